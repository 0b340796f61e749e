//! Rows as text, one line each, and the summary over all cells.

use std::fmt::Write;

use crate::simulate::{Row, Share};

/// The rows under a head, each with its namespaces if there are several. For each policy also its mean hit/OPT and
/// its worst cell against leaf-first LRU. Columns without information are left out.
pub fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.trace.len()).max().unwrap_or(0).max(5);
    let has_ssd = rows.iter().any(|row| row.ssd_capacity_bytes > 0);
    let has_sizes = rows.iter().any(|row| row.bytes / row.blocks.max(1) * row.blocks != row.bytes);
    let mut text = format!("{:width$}  {:8} {:>9} {:>7}", "trace", "policy", "blocks", "share");
    let tiers =
        if has_ssd { format!(" {:>8} {:>7} {:>7} {:>7}", "ssd", "pool", "below", "written") } else { String::new() };
    let sizes = if has_sizes { format!(" {:>7}", "by GB") } else { String::new() };
    let bounds = format!("{:>7} {:>7} {:>8} {:>8}", "opt", "ceiling", "hit/opt", "hit/lru");
    let _ = writeln!(text, "{tiers} {:>7}{sizes} {bounds}", "hit");
    for row in rows {
        let _ = write!(
            text,
            "{:width$}  {:8} {:>9} {}",
            row.trace,
            row.policy,
            row.capacity_blocks,
            percent(row.capacity_share)
        );
        let of = |count: u64| percent(count as f64 / row.blocks as f64);
        if has_ssd {
            let ssd = percent(row.ssd_capacity_share);
            let _ = write!(text, " {ssd:>8} {} {} {}", of(row.pool_hits), of(row.ssd_hits), of(row.ssd_written_blocks));
        }
        let _ = write!(text, " {}", of(row.prefix_hits));
        if has_sizes {
            let _ = write!(text, " {}", percent(row.hit_bytes_ratio()));
        }
        let by_bytes = |bytes: u64| percent(bytes as f64 / row.bytes as f64);
        let show = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.4}"));
        let _ = writeln!(
            text,
            " {:>7} {} {:>8} {:>8}",
            row.opt_hit_bytes.map_or("-".into(), by_bytes),
            by_bytes(row.infinite_hit_bytes),
            show(row.opt_ratio()),
            show(lru_ratio(rows, row)),
        );
        row.namespaces.iter().for_each(|share| text += &namespace(share, width));
    }
    text + &summary(rows) + LEGEND
}

const LEGEND: &str = "opt: the best possible cache of this size; ceiling: a cache without limit; \
                      hit/opt, hit/lru: hits relative to those of opt, and of the policy lru\n\
                      prefix/object hits: blocks found with none missing before them in the prompt, relative to all \
                      blocks found; worst: the lowest of all cells\n";

fn namespace(share: &Share, width: usize) -> String {
    let Share { namespace, block_bytes, blocks, pool_hits, ssd_hits, prefix_hits, .. } = share;
    let of = |count: &u64| percent(*count as f64 / (*blocks).max(1) as f64);
    let size = block_bytes.map_or(String::new(), |bytes| format!(", {bytes} bytes a block"));
    format!(
        "{:width$}    namespace {namespace}{size}: {blocks} blocks asked, hit {}: pool {}, below {}\n",
        "",
        of(prefix_hits).trim(),
        of(pool_hits).trim(),
        of(ssd_hits).trim()
    )
}

/// As wide for every share: a cache may be far larger than what a trace asks for.
fn percent(ratio: f64) -> String {
    match 100.0 * ratio {
        percent @ ..999.995 => format!("{percent:>6.2}%"),
        percent @ ..999_999.5 => format!("{percent:>6.0}%"),
        percent => format!("{percent:>6.0e}%"),
    }
}

/// Hits relative to those of `lru` in the same cell, if it was run; by bytes.
pub fn lru_ratio(rows: &[Row], row: &Row) -> Option<f64> {
    let is_same_cell = |other: &&Row| {
        (&other.trace, other.capacity_bytes, other.ssd_capacity_bytes)
            == (&row.trace, row.capacity_bytes, row.ssd_capacity_bytes)
    };
    let lru = rows.iter().filter(is_same_cell).find(|other| other.policy == "lru")?;
    (lru.hit_bytes > 0).then(|| row.hit_bytes as f64 / lru.hit_bytes as f64)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_any_size_is_as_wide_as_its_column() {
        let told = [0.0, 0.5, 9.9999, 9.99999, 42.0, 1234.5, 2_000_000.0].map(percent);
        assert_eq!(told, ["  0.00%", " 50.00%", "999.99%", "  1000%", "  4200%", "123450%", "   2e8%"]);
    }
}
