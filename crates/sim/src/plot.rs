//! Hit rate by bytes against the pool's capacity as a picture. There is a panel for each trace, and a line for each
//! policy and SSD. Where there is an SSD a thin line shows what the pool alone served.

use crate::chart::{Axis, Kind, Line, Panel, Scale};
use crate::simulate::Row;

/// Rows of one or several traces.
pub fn panels(rows: &[Row]) -> Vec<Panel> {
    let mut traces: Vec<&str> = Vec::new();
    for row in rows {
        if !traces.contains(&row.trace.as_str()) {
            traces.push(&row.trace);
        }
    }
    let of = |trace: &str| rows.iter().filter(|row| row.trace == trace).collect::<Vec<_>>();
    traces.into_iter().map(|trace| panel(trace, &of(trace))).collect()
}

fn panel(trace: &str, rows: &[&Row]) -> Panel {
    let mut own: Vec<(String, Vec<&Row>)> = Vec::new();
    for row in rows {
        match own.iter_mut().find(|(name, _)| *name == label(row)) {
            Some((_, of_line)) => of_line.push(row),
            None => own.push((label(row), vec![row])),
        }
    }
    let line = |label: &str, kind, points| Line { label: label.to_owned(), kind, points };
    let of = |rows: &[&Row], value: fn(&Row) -> Option<f64>| -> Vec<(f64, f64)> {
        rows.iter().filter_map(|row| Some((row.capacity_share, value(row)?))).collect()
    };
    let ceiling = of(rows, |row| Some(row.infinite_hit_bytes as f64 / row.bytes as f64));
    let ends = |points: &[(f64, f64)]| {
        let by_share = |a: &&(f64, f64), b: &&(f64, f64)| a.0.total_cmp(&b.0);
        points.iter().min_by(by_share).into_iter().chain(points.iter().max_by(by_share)).copied().collect()
    };
    let mut lines = vec![line("ceiling", Kind::Bound("2 3"), ends(&ceiling))];
    // It is that of pool and SSD, whatever the policy.
    for (_, of_line) in own.iter().filter(|(_, of_line)| of_line[0].policy == rows[0].policy) {
        let optimum = of(of_line, |row| Some(row.opt_hit_bytes? as f64 / row.bytes as f64));
        if !optimum.is_empty() {
            lines.push(line("optimum", Kind::Bound("7 3"), optimum));
        }
    }
    for (at, (name, of_line)) in own.iter().enumerate() {
        lines.push(line(name, Kind::Own(at), of(of_line, |row| Some(row.hit_bytes_ratio()))));
        if of_line[0].ssd_capacity_bytes > 0 {
            let pool = of(of_line, |row| Some(row.pool_hits as f64 / row.blocks as f64));
            lines.push(line("pool", Kind::Part(at), pool));
        }
    }
    Panel {
        title: trace.to_owned(),
        scale: Scale::Logarithm,
        x: Axis { label: "pool, share of different blocks".to_owned(), text: share },
        y: Axis { label: "hit rate by bytes".to_owned(), text: share },
        most: 1.0,
        lines,
        notes: Vec::new(),
    }
}

fn label(row: &Row) -> String {
    match row.ssd_capacity_bytes {
        0 => row.policy.clone(),
        _ => format!("{} + {}", row.policy, share(row.ssd_capacity_share)),
    }
}

fn share(ratio: f64) -> String {
    format!("{}%", (ratio * 1e4).round() / 1e2)
}
