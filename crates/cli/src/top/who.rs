//! Who uses the pool: engines, tenants or namespaces.

use std::cmp::Reverse;

use forebay_rpc::proto::{FrameEngine, FrameNamespace, FrameReply, FrameTenant};

use super::look::{Look, Sort, Who};
use super::text::{Column, Line, Style, count, heads, percent, row};
use crate::output::{escaped, saved, size};

/// Of the table that is shown, without its head.
pub fn rows(frame: &FrameReply, look: &Look) -> usize {
    match look.who {
        Who::Engines => frame.engines.iter().filter(|engine| look.shows(&[&engine.engine_id])).count(),
        Who::Tenants => frame.tenants.iter().filter(|tenant| look.shows(&[&tenant.tenant])).count(),
        Who::Namespaces => frame.namespaces.iter().filter(|namespace| shows(look, namespace)).count(),
    }
}

pub fn table(frame: &FrameReply, look: &Look, width: usize, room: usize) -> Vec<Line> {
    match look.who {
        Who::Engines => engines_short(frame, look, width, room),
        Who::Tenants => tenants(frame, look, room),
        Who::Namespaces => namespaces(frame, look, room),
    }
}

fn shows(look: &Look, namespace: &FrameNamespace) -> bool {
    look.shows(&[&namespace.namespace_id, &namespace.model, &namespace.tenant])
}

/// A head, as many lines as fit, and how many do not.
fn fit(head: Line, mut lines: Vec<Line>, room: usize, look: &Look, nothing: &str) -> Vec<Line> {
    if lines.is_empty() {
        let nothing =
            if look.filter.is_empty() { nothing.to_owned() } else { format!("no name has `{}`", look.filter) };
        lines.push(Line::plain(nothing));
    }
    let (all, rows) = (lines.len(), room.saturating_sub(1).max(1));
    if all > rows {
        lines.truncate(rows - 1);
        lines.push(Line::plain(format!("and {} more", all - (rows - 1))));
    }
    std::iter::once(head).chain(lines).collect()
}

fn sorted<'a>(frame: &'a FrameReply, look: &Look) -> Vec<&'a FrameEngine> {
    let mut engines: Vec<_> = frame.engines.iter().filter(|engine| look.shows(&[&engine.engine_id])).collect();
    match look.sort {
        Sort::Keys => engines.sort_by(|a, b| b.keys_per_second.total_cmp(&a.keys_per_second)),
        Sort::HitRate => {
            let ratio = |engine: &FrameEngine| engine.hit_ratio.unwrap_or(-1.0);
            engines.sort_by(|a, b| ratio(b).total_cmp(&ratio(a)));
        }
        Sort::Leased => engines.sort_by_key(|engine| Reverse(engine.leased_blocks)),
        Sort::Name => engines.sort_by(|a, b| a.engine_id.cmp(&b.engine_id)),
    }
    engines
}

/// What they need besides the name; a name has what is left, within reason.
const OTHERS: usize = 64;

fn columns(width: usize) -> [Column; 8] {
    [
        Column { head: "ENGINE", width: width.saturating_sub(OTHERS).clamp(8, 24) },
        Column { head: "STATE", width: 9 },
        Column { head: ">RANKS", width: 6 },
        Column { head: ">KEYS/S", width: 7 },
        Column { head: ">HIT", width: 7 },
        Column { head: ">LEASED", width: 7 },
        Column { head: ">FILLING", width: 7 },
        Column { head: ">WAITING", width: 7 },
    ]
}

fn engine(columns: &[Column; 8], engine: &FrameEngine) -> Line {
    let ranks = if engine.ranks == 0 { "-".to_owned() } else { format!("{}/{}", engine.attached_ranks, engine.ranks) };
    let cells = [
        escaped(&engine.engine_id),
        engine.state.clone(),
        ranks,
        count(engine.keys_per_second),
        percent(engine.hit_ratio),
        engine.leased_blocks.to_string(),
        engine.reserved_blocks.to_string(),
        engine.waiting_lookups.to_string(),
    ];
    let style = match engine.state.as_str() {
        "ready" | "client" => Style::Good,
        "attaching" => Style::Warn,
        _ => Style::Bad,
    };
    let first = format!("{}  ", row(&columns[..1], &cells[..1]));
    Line::plain(first)
        .and(style, row(&columns[1..2], &cells[1..2]))
        .and(Style::Plain, format!("  {}", row(&columns[2..], &cells[2..])))
}

fn engines_short(frame: &FrameReply, look: &Look, width: usize, room: usize) -> Vec<Line> {
    let columns = columns(width);
    let lines = sorted(frame, look).into_iter().map(|of| engine(&columns, of)).collect();
    fit(heads(&columns), lines, room, look, "no engine is connected")
}

/// With what each has looked up and saved since it came.
pub fn engines(frame: &FrameReply, look: &Look, width: usize, room: usize) -> Vec<Line> {
    let columns = columns(width);
    let more = |of: &FrameEngine| {
        let saved = saved(of.saved_tokens, (of.saved_prefill_seconds * 1e6) as u64);
        let told = Line::plain(format!("  {} hits of {} keys; saved {saved}", of.hits, of.keys));
        std::iter::once(engine(&columns, of)).chain(told.wrapped(width, 4))
    };
    let lines: Vec<Line> = sorted(frame, look).into_iter().flat_map(more).collect();
    let sort = format!("sorted by {}; below each: what it looked up and saved since it came", look.sort.name());
    let told = fit(heads(&columns), lines, room.saturating_sub(2), look, "no engine is connected");
    [vec![Line::default(), Line::plain(sort)], told].concat()
}

fn tenants(frame: &FrameReply, look: &Look, room: usize) -> Vec<Line> {
    let columns = [
        Column { head: "TENANT", width: 24 },
        Column { head: ">IN THE POOL", width: 12 },
        Column { head: ">NAMESPACES", width: 10 },
    ];
    let line = |tenant: &FrameTenant| {
        let called = if tenant.tenant.is_empty() { "(none)".to_owned() } else { escaped(&tenant.tenant) };
        Line::plain(row(&columns, &[called, size(tenant.ready_bytes), tenant.namespaces.to_string()]))
    };
    let lines = frame.tenants.iter().filter(|tenant| look.shows(&[&tenant.tenant])).map(line).collect();
    fit(heads(&columns), lines, room, look, "no tenant has blocks in the pool")
}

fn namespaces(frame: &FrameReply, look: &Look, room: usize) -> Vec<Line> {
    let columns = [
        Column { head: "NAMESPACE", width: 9 },
        Column { head: "MODEL", width: 24 },
        Column { head: "TENANT", width: 10 },
        Column { head: ">IN THE POOL", width: 11 },
        Column { head: ">HIT", width: 7 },
        Column { head: ">OPTIMUM", width: 7 },
    ];
    let line = |namespace: &FrameNamespace| {
        let cells = [
            namespace.namespace_id.chars().take(8).collect(),
            escaped(&namespace.model),
            escaped(&namespace.tenant),
            size(namespace.ready_bytes),
            percent(namespace.hit_ratio),
            percent(namespace.optimum_ratio),
        ];
        Line::plain(row(&columns, &cells))
    };
    let lines = frame.namespaces.iter().filter(|namespace| shows(look, namespace)).map(line).collect();
    fit(heads(&columns), lines, room, look, "no namespace has blocks in the pool")
}
