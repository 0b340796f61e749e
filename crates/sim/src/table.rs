//! Rows as text, one line each, and the summary over all cells.

use std::fmt::Write;

use crate::simulate::Row;

/// The rows under a head, and for each policy its mean hit/OPT and its worst cell against leaf-first LRU.
pub fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.trace.len()).max().unwrap_or(0).max(5);
    let mut text = format!(
        "{:width$}  {:8} {:>9} {:>7} {:>7} {:>7} {:>7} {:>8} {:>8}\n",
        "trace", "policy", "blocks", "share", "hit", "opt", "ceiling", "hit/opt", "hit/lru"
    );
    for row in rows {
        let of = |hits: u64| 100.0 * hits as f64 / row.blocks as f64;
        let optional =
            |value: Option<f64>, digits: usize| value.map_or("-".into(), |value| format!("{value:.digits$}"));
        let _ = writeln!(
            text,
            "{:width$}  {:8} {:>9} {:>6.2}% {:>6.2}% {:>7} {:>6.2}% {:>8} {:>8}",
            row.trace,
            row.policy,
            row.capacity_blocks,
            100.0 * row.capacity_share,
            of(row.prefix_hits),
            row.opt_prefix_hits.map_or("-".into(), |opt| format!("{:.2}%", of(opt))),
            of(row.infinite_prefix_hits),
            optional(row.opt_ratio(), 4),
            optional(lru_ratio(rows, row), 4),
        );
    }
    text + &summary(rows)
}

/// Hits against those of `lru` in the same cell, if it was run.
pub fn lru_ratio(rows: &[Row], row: &Row) -> Option<f64> {
    let is_same_cell = |other: &&Row| other.trace == row.trace && other.capacity_blocks == row.capacity_blocks;
    let lru = rows.iter().filter(is_same_cell).find(|other| other.policy == "lru")?;
    (lru.prefix_hits > 0).then(|| row.prefix_hits as f64 / lru.prefix_hits as f64)
}

fn summary(rows: &[Row]) -> String {
    let mut text = String::new();
    let mut policies: Vec<&str> = Vec::new();
    rows.iter().for_each(|row| {
        if !policies.contains(&row.policy.as_str()) {
            policies.push(&row.policy)
        }
    });
    for policy in policies {
        let own: Vec<&Row> = rows.iter().filter(|row| row.policy == policy).collect();
        let mean = own.iter().map(|row| row.opt_ratio()).sum::<Option<f64>>().map(|sum| sum / own.len() as f64);
        let worst = own.iter().filter_map(|row| lru_ratio(rows, row)).reduce(f64::min);
        let closed = own.iter().map(|row| row.prefix_hits as f64 / row.object_hits.max(1) as f64).reduce(f64::min);
        let show = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.4}"));
        let _ = writeln!(
            text,
            "{policy}: {} cells, mean hit/opt {}, worst hit/lru {}, worst prefix/object hits {}",
            own.len(),
            show(mean),
            show(worst),
            show(closed),
        );
    }
    text
}
