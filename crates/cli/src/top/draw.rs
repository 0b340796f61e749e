//! The screen as lines: pure, so that a terminal, `--once` and the tests get the same.
//!
//! The order is that of the questions: is anything wrong, is it worth it, why not more, which tier, who, what would
//! help.

use forebay_rpc::proto::{FrameMiss, FramePool, FrameReply, FrameTier};

use super::chart::{chart, spark};
use super::look::{Look, View};
use super::text::{Column, Line, Style, clock, count, heads, percent, row, speed, time};
use super::who;
use crate::output::{counted, escaped, size, uptime};

/// What stands below everything.
const KEYS: &str = "q quit  p pause  tab who  m misses  c curves  e engines  t tiers  ? help";

/// Of the history, on a screen that has room for everything.
const PICTURE: usize = 10;
const LEAST_PICTURE: usize = 6;
/// No terminal has more: what is drawn is text.
const MAX_ROWS: usize = 10_000;
/// Below it some columns are left out.
const WIDE: usize = 100;

/// At most `height` lines of at most `width`. Text, which has no height, is laid out for `width`, and nothing of it is
/// cut.
pub fn draw(frame: &FrameReply, look: &Look, width: usize, height: usize) -> Vec<Line> {
    let mut lines = vec![header(frame, look, width)];
    lines.extend(wrong(frame, look).into_iter().flat_map(|line| line.wrapped(width, 7)));
    let room = height.saturating_sub(lines.len() + 1);
    let body = match look.view {
        View::Answer => answer(frame, look, width, room),
        View::Misses => misses_in_full(frame, width),
        View::Curves => curves(frame, width),
        View::Engines => who::engines(frame, look, width, room),
        View::Tiers => tiers_in_full(frame, width),
        View::Help => help(),
    };
    lines.extend(body.into_iter().take(room));
    if height > MAX_ROWS {
        return lines;
    }
    lines.resize_with(height.saturating_sub(1), Line::default);
    lines.push(footer(look));
    lines.into_iter().map(|line| line.clipped(width)).collect()
}

fn header(frame: &FrameReply, look: &Look, width: usize) -> Line {
    let pool = frame.pool.unwrap_or_default();
    let populated = match pool.populated_bytes < pool.capacity_bytes {
        true => format!(", {} populated", size(pool.populated_bytes)),
        false => String::new(),
    };
    let huge = match pool.huge_bytes {
        Some(bytes) if bytes > 0 && bytes == pool.populated_bytes => ", all huge".to_owned(),
        Some(bytes) => format!(", {} huge", size(bytes)),
        None => String::new(),
    };
    let engines = frame.engines.iter().filter(|engine| engine.ranks > 0 && engine.state != "gone").count() as u64;
    let (host, up, capacity) = (escaped(&frame.host), uptime(frame.uptime_seconds), size(pool.capacity_bytes));
    let told = |details: &str| format!("  {host}  up {up}  pool {capacity}{details}  {}", counted(engines, "engine"));
    let clock = format!("{}{}", if look.is_paused { "PAUSED " } else { "" }, clock(frame));
    let left = |text| Line::styled(Style::Title, "forebay top").and(Style::Plain, text);
    let room = width.saturating_sub(clock.chars().count());
    // The last one says least.
    let ways = [format!("{populated}{huge}"), populated, String::new()].map(|details| left(told(&details)));
    let shown = ways.iter().find(|line| line.len() < room).unwrap_or(&ways[2]).clone();
    shown.beside(room, Line::styled(Style::Title, clock))
}

/// What is wrong, the worst first; or that nothing is.
fn wrong(frame: &FrameReply, look: &Look) -> Vec<Line> {
    let mut lines = Vec::new();
    if let Some(gone) = &look.gone {
        lines.push(Line::styled(Style::Bad, "NO DAEMON  ").and(Style::Plain, gone.clone()));
    }
    let failed = frame.checks.iter().filter(|check| check.finding == "fail");
    lines.extend(failed.map(|check| {
        let head = if frame.is_live { "NOT READY  " } else { "STUCK  " };
        Line::styled(Style::Bad, head).and(Style::Plain, format!("{}: {}", check.name, escaped(&check.why)))
    }));
    for alarm in &frame.alarms {
        let text = format!("{}: {}", alarm.name, escaped(&alarm.cause));
        lines.push(Line::styled(Style::Bad, "ALARM  ").and(Style::Plain, text));
        lines.push(Line::plain(format!("       {}", escaped(&alarm.hint))));
    }
    let warned = frame.checks.iter().filter(|check| check.finding == "warn");
    lines.extend(warned.map(|check| {
        Line::styled(Style::Warn, "WARN  ").and(Style::Plain, format!("{}: {}", check.name, escaped(&check.why)))
    }));
    if lines.is_empty() {
        lines.push(Line::styled(Style::Good, "OK  ").and(Style::Plain, "the daemon is ready and no alarm is raised"));
    }
    lines
}

/// Everything at once, as much of it as there is room for.
fn answer(frame: &FrameReply, look: &Look, width: usize, room: usize) -> Vec<Line> {
    let (pool, mut rates) = (pool(frame.pool.unwrap_or_default(), width), rates_and_misses(frame, width));
    let (tiers, help) = (tiers(frame, width), help_of_sizes(frame, width));
    if room > MAX_ROWS {
        rates.extend(note_of_stores(frame, width));
    }
    let blanks = if room > 28 { 4 } else { 0 };
    let fixed = pool.len() + rates.len() + tiers.len() + help.len() + blanks;
    let left = room.saturating_sub(fixed);
    let rows = who::rows(frame, look);
    // A picture is worth six lines where those who use the pool keep theirs.
    let beside = |shown: usize| left.saturating_sub(2 + rows.min(shown));
    let most = if room > MAX_ROWS { PICTURE } else { 2 * PICTURE };
    let picture = [12, 4].map(beside).into_iter().find(|height| *height >= LEAST_PICTURE).unwrap_or(0).min(most);
    let history = match &frame.hour {
        Some(hour) if picture > 0 => chart(hour, width, picture),
        Some(hour) if left > 3 => vec![spark(hour, width)],
        _ => Vec::new(),
    };
    let who = who::table(frame, look, width, left.saturating_sub(history.len()).max(2));
    let parts = [pool, [rates, history].concat(), tiers, who, help];
    let mut lines = Vec::new();
    for part in parts.into_iter().filter(|part| !part.is_empty()) {
        if blanks > 0 && !lines.is_empty() {
            lines.push(Line::default());
        }
        lines.extend(part);
    }
    lines
}

/// A bar, and what is in it.
fn pool(pool: FramePool, width: usize) -> Vec<Line> {
    let told = format!("] used {} of {}", size(pool.used_bytes), size(pool.capacity_bytes));
    let room = width.saturating_sub("POOL  [".len() + told.len()).min(120);
    let unpinned = pool.ready_bytes.saturating_sub(pool.pinned_bytes);
    let parts = [
        ('#', "ready", unpinned, Style::Good),
        ('+', "pinned", pool.ready_bytes - unpinned, Style::Title),
        ('r', "reserved", pool.reserved_bytes, Style::Warn),
        ('p', "promoting", pool.promoting_bytes, Style::Warn),
        ('f', "fenced", pool.fenced_bytes, Style::Bad),
    ];
    let (unit, unit_bytes) = unit(pool.capacity_bytes);
    let (mut bar, mut sum, mut drawn) = (Line::styled(Style::Title, "POOL  ").and(Style::Plain, "["), 0, 0);
    for (mark, _, bytes, style) in parts {
        sum += bytes;
        let end = (sum as f64 / pool.capacity_bytes.max(1) as f64 * room as f64).round() as usize;
        let end = end.clamp(drawn, room);
        bar = bar.and(style, mark.to_string().repeat(end - drawn));
        drawn = end;
    }
    bar = bar.and(Style::Plain, ".".repeat(room - drawn));
    let legend = parts.iter().filter(|(mark, _, bytes, _)| *bytes > 0 || *mark == '#');
    let figure = |bytes: u64| format!("{:.1}", bytes as f64 / unit_bytes as f64);
    let legend: Vec<String> =
        legend.map(|(mark, what, bytes, _)| format!("{mark} {what} {}", figure(*bytes))).collect();
    let flow = format!("in {}  out {}", speed(pool.stored_bytes_per_second), speed(pool.evicted_bytes_per_second));
    // The rows of the tiers tell the flow too.
    let ways = [format!("{}  {flow}", legend.join("  ")), format!("{}  {flow}", legend.join(" ")), legend.join(" ")];
    let legend = ways.iter().find(|text| text.len() + 6 <= width).unwrap_or(&ways[2]);
    vec![bar.and(Style::Plain, told), Line::plain(format!("{unit:<6}{legend}"))]
}

/// The unit in which a size is told.
fn unit(bytes: u64) -> (&'static str, u64) {
    match bytes {
        0..1_073_741_824 => ("MiB", 1 << 20),
        1_073_741_824..1_099_511_627_776 => ("GiB", 1 << 30),
        _ => ("TiB", 1 << 40),
    }
}

/// How good the hit rate is, beside why it is not better.
fn rates_and_misses(frame: &FrameReply, width: usize) -> Vec<Line> {
    let left = rates(frame);
    let mut misses: Vec<&FrameMiss> = frame.misses.iter().filter(|miss| miss.keys > 0).collect();
    misses.sort_by(|a, b| b.share_ratio.unwrap_or(0.0).total_cmp(&a.share_ratio.unwrap_or(0.0)));
    let columns = [WHY, Column { head: ">keys/s", width: 6 }, Column { head: ">share", width: 7 }];
    let miss = |miss: &&FrameMiss| {
        let cells = [words(&miss.reason), count(miss.keys_per_second), percent(miss.share_ratio)];
        let figures = Line::plain(row(&columns, &cells));
        let room = width.saturating_sub(HALF + figures.len() + 2);
        // Bars of a few characters look alike.
        let longest = if room < 10 { 0 } else { room.min(20) };
        let bar = "#".repeat((miss.share_ratio.unwrap_or(0.0) * longest as f64).round() as usize);
        figures.and(Style::Warn, format!("  {bar}"))
    };
    let mut right = vec![heads(&columns)];
    right.extend(misses.iter().take(left.len() - 1).map(miss));
    if misses.is_empty() {
        right.push(Line::plain("no key has missed"));
    }
    right.resize_with(left.len(), Line::default);
    left.into_iter().zip(right).map(|(left, right)| left.beside(HALF, right)).collect()
}

/// Of the hit rates, and the blanks behind them.
const HALF: usize = 44;
const WHY: Column = Column { head: "WHY NOT", width: 15 };

fn rates(frame: &FrameReply) -> Vec<Line> {
    let lookups = frame.lookups.unwrap_or_default();
    let estimates = frame.estimates.clone().unwrap_or_default();
    let columns = [
        Column { head: "HIT RATE", width: 10 },
        Column { head: ">now", width: 6 },
        Column { head: ">15 m", width: 6 },
        Column { head: ">1 h", width: 6 },
        Column { head: ">1 d", width: 6 },
    ];
    let short = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{:.1}", 100.0 * ratio));
    let windows = |of: fn(&forebay_rpc::proto::FrameWindow) -> Option<f64>| {
        (0..3).map(|at| short(frame.windows.get(at).and_then(of))).collect::<Vec<_>>()
    };
    let line = |what: &str, now: String, windows: Vec<String>| {
        Line::plain(row(&columns, &[vec![what.to_owned(), now], windows].concat()))
    };
    let sampled = match estimates.sampled_keys {
        0 => "optimum of this size: no sample yet".to_owned(),
        _ => format!("optimum {}, hit {} of a sample", percent(estimates.optimum_ratio), percent(estimates.hit_ratio)),
    };
    let saving = frame.saved.unwrap_or_default();
    let least = match saving.prefill_seconds {
        ..1.0 => String::new(),
        ..600.0 => format!(", >= {:.0} s of prefill", saving.prefill_seconds),
        ..36_000.0 => format!(", >= {:.0} min of prefill", saving.prefill_seconds / 60.0),
        seconds => format!(", >= {:.0} h of prefill", (seconds / 3600.0).floor()),
    };
    vec![
        heads(&columns),
        line("hit %", short(lookups.hit_ratio), windows(|window| window.hit_ratio)),
        line("no limit %", "-".to_owned(), windows(|window| window.ceiling_ratio)),
        Line::plain(sampled),
        Line::plain(format!(
            "{} keys/s, answer {}, p99 {}",
            count(lookups.keys_per_second),
            time(lookups.p50_seconds),
            time(lookups.p99_seconds)
        )),
        Line::plain(format!("saved {} tokens{least}", count(saving.tokens as f64))),
    ]
}

/// `never_seen` as people say it.
fn words(reason: &str) -> String {
    match reason {
        "promotion_unfinished" => "on its way".to_owned(),
        reason => escaped(&reason.replace('_', " ")),
    }
}

fn state_of(tier: &FrameTier) -> Style {
    match tier.state.as_str() {
        "serving" if tier.trouble.is_empty() => Style::Good,
        "serving" | "opening" => Style::Warn,
        _ => Style::Bad,
    }
}

fn tiers(frame: &FrameReply, width: usize) -> Vec<Line> {
    let columns = [
        Column { head: "TIER", width: 6 },
        Column { head: "STATE", width: 8 },
        Column { head: ">HOLDS", width: 9 },
        Column { head: ">OF HITS", width: 7 },
        Column { head: ">UP/S", width: 9 },
        Column { head: ">P99", width: 8 },
        Column { head: ">DOWN/S", width: 9 },
        Column { head: ">WAIT", width: 5 },
        Column { head: ">P50", width: 8 },
    ];
    let is_wide = width >= WIDE;
    let shown = if is_wide { columns.len() } else { columns.len() - 1 };
    let beside = |line: Line, style: Style, trouble: &str| match is_wide {
        true => line.and(style, format!("  {trouble}")),
        false => line,
    };
    let flow = |rate: f64| if rate < 1.0 { "-".to_owned() } else { size(rate as u64) };
    let line = |tier: &FrameTier| {
        let cells = [
            escaped(&tier.name),
            tier.state.clone(),
            tier.held_bytes.map_or("-".to_owned(), size),
            percent(tier.share_ratio),
            flow(tier.up_bytes_per_second),
            time(tier.p99_seconds),
            flow(tier.down_bytes_per_second),
            count((tier.waiting_blocks + tier.waiting_operations) as f64),
            time(tier.p50_seconds),
        ];
        let line = Line::styled(state_of(tier), row(&columns[..2], &cells[..2]))
            .and(Style::Plain, format!("  {}", row(&columns[2..shown], &cells[2..shown])));
        beside(line, Style::Plain, &escaped(&tier.trouble))
    };
    let head = beside(heads(&columns[..shown]), Style::Title, "TROUBLE");
    std::iter::once(head).chain(frame.tiers.iter().map(line)).collect()
}

/// Hit rates with other sizes of memory and disk.
fn help_of_sizes(frame: &FrameReply, width: usize) -> Vec<Line> {
    let estimates = frame.estimates.clone().unwrap_or_default();
    if estimates.sampled_keys < crate::advise::LEAST_KEYS {
        let keys = format!("{} keys of {}", estimates.sampled_keys, crate::advise::LEAST_KEYS);
        let text = format!("too little traffic yet to estimate other sizes: a sample of {keys}");
        return Line::styled(Style::Title, "HELPS     ").and(Style::Plain, text).wrapped(width, 10);
    }
    let capacity = frame.pool.unwrap_or_default().capacity_bytes;
    let line = |what: &str, curve: &[forebay_rpc::proto::CurvePoint], present: u64| {
        let point = |point: &forebay_rpc::proto::CurvePoint| {
            let bytes = if point.capacity_bytes == 0 { "none".to_owned() } else { size(point.capacity_bytes) };
            let told = format!("{bytes} {:.1}", 100.0 * point.hit_ratio);
            if point.capacity_bytes == present { format!("[{told}]") } else { told }
        };
        let mut lines = vec![Line::styled(Style::Title, format!("{what:<8}"))];
        for told in curve.iter().map(point) {
            if lines.last().is_some_and(|line| line.len() + 2 + told.len() > width) {
                lines.push(Line::plain(" ".repeat(8)));
            }
            let last = lines.pop().unwrap_or_default();
            lines.push(last.and(Style::Plain, format!("  {told}")));
        }
        lines
    };
    let memory = line("MEMORY %", &estimates.memory_curve, capacity);
    [memory, line("DISK %", &estimates.disk_curve, estimates.disk_bytes)].concat()
}

fn misses_in_full(frame: &FrameReply, width: usize) -> Vec<Line> {
    let columns = [
        Column { head: "WHY NOT", width: 20 },
        Column { head: ">keys/s", width: 8 },
        Column { head: ">15 m", width: 7 },
        Column { head: ">keys", width: 12 },
        Column { head: "the key", width: 80 },
    ];
    let line = |miss: &FrameMiss| {
        let share = percent(miss.share_ratio);
        let meaning = crate::advise::meaning(&miss.reason).to_owned();
        let cells = [words(&miss.reason), count(miss.keys_per_second), share, miss.keys.to_string()];
        let figures = row(&columns, &cells) + "  ";
        let indent = figures.chars().count();
        Line::plain(figures).and(Style::Plain, meaning).wrapped(width, indent)
    };
    let lookups = frame.lookups.unwrap_or_default();
    let all = format!(
        "{} keys were looked up since the daemon started; {} were hits; the others missed for these reasons",
        lookups.keys, lookups.hits
    );
    let mut lines = vec![Line::default()];
    lines.extend(Line::plain(all).wrapped(width, 0));
    lines.extend([Line::default(), heads(&columns)]);
    lines.extend(frame.misses.iter().flat_map(line));
    lines
}

/// What the estimates leave out, if a shared store serves.
fn note_of_stores(frame: &FrameReply, width: usize) -> Vec<Line> {
    let stores: Vec<String> =
        frame.tiers.iter().filter(|tier| tier.is_shared).map(|tier| escaped(&tier.name)).collect();
    match stores.is_empty() {
        true => Vec::new(),
        false => Line::plain(crate::advise::note_of_stores(&stores)).wrapped(width, 0),
    }
}

fn curves(frame: &FrameReply, width: usize) -> Vec<Line> {
    let estimates = frame.estimates.clone().unwrap_or_default();
    let mut lines = vec![Line::default()];
    lines.extend(note_of_stores(frame, width));
    if lines.len() > 1 {
        lines.push(Line::default());
    }
    if estimates.sampled_keys < crate::advise::LEAST_KEYS {
        lines.extend(help_of_sizes(frame, width));
        return lines;
    }
    let capacity = frame.pool.unwrap_or_default().capacity_bytes;
    let curves = [
        ("MEMORY, with the present disk", &estimates.memory_curve, capacity),
        ("DISK, with the present memory", &estimates.disk_curve, estimates.disk_bytes),
    ];
    for (title, curve, present) in curves {
        lines.push(Line::styled(Style::Title, title));
        for point in curve.iter() {
            let here = if point.capacity_bytes == present { "<- here" } else { "" };
            let bar = "#".repeat((point.hit_ratio * 40.0).round() as usize);
            let bytes = if point.capacity_bytes == 0 { "none".to_owned() } else { size(point.capacity_bytes) };
            let text = format!("{bytes:>10}  {:>7}  ", percent(Some(point.hit_ratio)));
            lines.push(Line::plain(text).and(Style::Good, bar).and(Style::Title, format!(" {here}")));
        }
        lines.push(Line::default());
    }
    let best = percent(estimates.optimum_ratio);
    let sample = format!(
        "on a sample of {} recent keys: hit {}, best cache of this size {best}, cache without limit {}",
        estimates.sampled_keys,
        percent(estimates.hit_ratio),
        percent(estimates.ceiling_ratio)
    );
    lines.extend(Line::plain(sample).wrapped(width, 2));
    lines
}

fn tiers_in_full(frame: &FrameReply, width: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    for tier in &frame.tiers {
        let shared = if tier.is_shared { ", shared with other hosts" } else { "" };
        lines.push(Line::default());
        lines.push(
            Line::styled(Style::Title, escaped(&tier.name))
                .and(Style::Plain, "  ")
                .and(state_of(tier), tier.state.clone())
                .and(Style::Plain, shared),
        );
        if !tier.trouble.is_empty() {
            lines.extend(Line::styled(state_of(tier), format!("  {}", escaped(&tier.trouble))).wrapped(width, 4));
        }
        let capacity = tier.capacity_bytes.map_or(String::new(), |bytes| format!(" of {}", size(bytes)));
        let held = tier.held_bytes.map_or("unknown".to_owned(), size);
        let (hits, rate) = (tier.hits, count(tier.hits_per_second));
        let share = percent(tier.share_ratio);
        // The blocks of shared stores are in no index.
        let blocks = if tier.is_shared { "-".to_owned() } else { tier.held_blocks.to_string() };
        lines.push(Line::plain(format!("  holds {held}{capacity}, {blocks} blocks")));
        lines.push(Line::plain(format!("  hits {hits}, {rate}/s now, {share} of all in 15 minutes")));
        lines.push(Line::plain(format!(
            "  up {}, p50 {}, p99 {}; down {}",
            speed(tier.up_bytes_per_second),
            time(tier.p50_seconds),
            time(tier.p99_seconds),
            speed(tier.down_bytes_per_second),
        )));
        if tier.name != "pool" {
            let work = format!(
                "  loading {} blocks, writing {}, waiting {}; {} operations wait; {} late",
                tier.loading_blocks,
                tier.storing_blocks,
                tier.waiting_blocks,
                tier.waiting_operations,
                size(tier.late_bytes)
            );
            lines.extend(Line::plain(work).wrapped(width, 4));
        }
    }
    lines
}

fn help() -> Vec<Line> {
    let keys = [
        ("esc, 1", "the answer: everything at once"),
        ("m c e t", "misses, curves, engines, tiers"),
        ("tab", "below the tiers: engines, tenants or namespaces"),
        ("s", "sort engines by keys, hit rate, leased blocks or name"),
        ("/", "show only names that have these letters; enter ends, esc clears"),
        ("p", "pause, or go on"),
        ("w", "write this frame to a file here, as JSON"),
        ("q, ^C", "quit"),
    ];
    let words = [
        ("now", "the last second; times of day are UTC"),
        ("in, out", "stored into the pool, evicted from it"),
        ("no limit", "hit rate of a cache without limit: nothing can be better"),
        ("optimum", "hit rate of the best possible cache of this size, on a sample"),
        ("of hits", "15 min; a promoted block's first hit is its tier's, else the pool's"),
        ("up, down", "of the pool: hits and stores; of a tier: promotions and writes"),
    ];
    let line =
        |(what, meaning): &(&str, &str)| Line::styled(Style::Title, format!("  {what:10}")).and(Style::Plain, *meaning);
    let mut lines = vec![Line::default(), Line::plain("KEYS")];
    lines.extend(keys.iter().map(line));
    lines.extend([Line::default(), Line::plain("WORDS (docs/frame.md has all)")]);
    lines.extend(words.iter().map(line));
    lines
}

fn footer(look: &Look) -> Line {
    match (&look.said, look.is_typing) {
        (_, true) => Line::styled(Style::Title, format!("/{}_", look.filter)),
        (Some(said), false) => Line::styled(Style::Warn, said.clone()),
        (None, false) => Line::styled(Style::Title, KEYS),
    }
}
