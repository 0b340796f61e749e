//! `forebay advise`: how good the hit rate is, how good it could be, why the rest missed, what more memory and disk
//! would buy, for whom, and what looks wrong. One screen, or all facts as JSON.

mod plot;

use forebay_rpc::proto::{AdviseReply, AlarmInfo, CurvePoint, MissCount, SampledInfo, ShareInfo, WindowInfo};
use forebay_sim::chart;
use serde_json::{Value, json};

use crate::arguments::Advise;
use crate::client;
use crate::failure::Failure;
use crate::output::{Table, print, print_json, saved, size};
use crate::serve::runtime;

/// The estimates are of a sample of the keys; fewer keys than these give curves that mean nothing.
pub const LEAST_KEYS: u64 = 10_000;

pub fn run(arguments: &Advise) -> Result<(), Failure> {
    let mut client = client::connect(&arguments.daemon.socket_directory()?);
    let reply = runtime()?.block_on(client.advise())?;
    if arguments.json {
        print_json(&to_json(&reply));
    } else {
        print(&to_text(&reply));
    }
    if let Some(path) = &arguments.plot {
        chart::write(path, &plot::panels(&reply)?)?;
    }
    Ok(())
}

fn to_text(reply: &AdviseReply) -> String {
    if reply.keys == 0 {
        return "no engine has looked up a block yet\n".to_string();
    }
    let mut text = rates(reply);
    text += &format!(
        "\nloads have saved this since the daemon started: {}\n",
        saved(reply.saved_tokens, reply.saved_prefill_us)
    );
    if !reply.shared_stores.is_empty() {
        text += &format!("\n{}\n", note_of_stores(&reply.shared_stores));
    }
    text += &format!("\nmisses\n{}", misses(reply));
    if reply.keys < LEAST_KEYS {
        let keys = reply.keys;
        text += &format!(
            "\nthere is too little traffic yet to estimate other sizes of memory and disk: {keys} keys of {LEAST_KEYS}\n"
        );
    } else {
        text += &sizes(reply);
    }
    if reply.left_out > 0 {
        text += &format!("\n{} groups of lookups came too fast and were left out\n", reply.left_out);
    }
    for AlarmInfo { name, cause, hint } in &reply.alarms {
        text += &format!("\nalarm: {name}\n  cause: {cause}\n  hint: {hint}\n");
    }
    text
}

/// Why the hit rate may be above the optimum.
pub fn note_of_stores(stores: &[String]) -> String {
    let stores = stores.join(", ");
    format!("hits include those from {stores}; the optimum and all estimates below count memory and disk only")
}

/// What other sizes of memory and disk would hit.
fn sizes(reply: &AdviseReply) -> String {
    let below = if reply.disk_bytes > 0 { ", with the present disk" } else { "" };
    let mut text = format!("\nmemory{below}\n{}", memory(reply));
    text += &format!("\ndisk, with the present memory; hits of both\n{}", disk(reply));
    if reply.namespaces.len() > 1 {
        text += &format!("\nnamespaces, which share memory and disk\n{}", namespaces(reply));
    }
    text
}

fn rates(reply: &AdviseReply) -> String {
    let mut table = Table::new(&["hits", ">share", ">keys", "of"]);
    // Nothing is said of a sample that has no key yet.
    let mut row = |name: &str, share: f64, keys: u64, of: &str| {
        if keys == 0 {
            return;
        }
        table.row([name.to_string(), percent(share), keys.to_string(), of.to_string()]);
    };
    row("hit", ratio(reply.hits, reply.keys), reply.keys, "all keys since the daemon started");
    let sampled = |hits| ratio(hits, reply.sampled_keys);
    row("hit recently", sampled(reply.sampled_hits), reply.sampled_keys, "a sample of recent keys");
    row("optimum, memory", sampled(reply.sampled_optimum_hits), reply.sampled_keys, "the same sample");
    if let Some(below) = reply.all.as_ref().and_then(|all| all.sampled_tiers.as_ref()) {
        let optimum = ratio(below.optimum_hits, below.keys);
        row("optimum, memory + disk", optimum, below.keys, "another such sample");
    }
    row("cache without limit", sampled(reply.sampled_again), reply.sampled_keys, "the same sample");
    for window in reply.windows.iter().filter(|window| window.keys > 0) {
        row(
            "cache without limit",
            ceiling(window),
            window.keys,
            &format!("all keys of the last {}", duration(window.window_us)),
        );
    }
    table.render("")
}

fn misses(reply: &AdviseReply) -> String {
    let mut table = Table::new(&["reason", ">share of keys", ">keys", "the key"]);
    let all: u64 = reply.misses.iter().map(|miss| miss.count).sum();
    for MissCount { reason, count } in reply.misses.iter().filter(|miss| miss.count > 0) {
        table.row([reason.clone(), percent(ratio(*count, reply.keys)), count.to_string(), meaning(reason).to_string()]);
    }
    table.row(["all".to_string(), percent(ratio(all, reply.keys)), all.to_string(), String::new()]);
    table.render("  ")
}

/// Of a reason, as the daemon names it; a later daemon may know more of them.
pub fn meaning(reason: &str) -> &'static str {
    match reason {
        "never_seen" => "was never stored, or too long ago to be remembered",
        "evicted" => "was evicted from the pool to make room",
        "refused" => "was not kept: the block before it was absent, or the policy bypassed it",
        "failed" => "had a wrong checksum, or its tier failed",
        "too_slow" => "was on a lower tier, and did not come in time",
        "not_yet" => "was still being verified after a restart, or was behind such a key",
        "other_namespace" => "is stored for another model, layout or tenant",
        "over_limit" => "was ready, but the engine held too much of the pool (`pool.promise_share`)",
        "promotion_unfinished" => "was still on its way from a lower tier",
        _ => "",
    }
}

fn memory(reply: &AdviseReply) -> String {
    changes(reply.curve.iter(), reply.capacity_bytes)
}

/// None, every second of the other capacities told, and the present one.
fn disk(reply: &AdviseReply) -> String {
    let curve = reply.all.as_ref().map_or(&[][..], |all| &all.disk_curve);
    let is_shown = |at: usize, point: &CurvePoint| at.is_multiple_of(2) || point.capacity_bytes == reply.disk_bytes;
    let shown = curve.iter().enumerate().filter(|(at, point)| is_shown(*at, point)).map(|(_, point)| point);
    changes(shown, reply.disk_bytes)
}

fn changes<'a>(points: impl Iterator<Item = &'a CurvePoint> + Clone, present_bytes: u64) -> String {
    let present = nearest(points.clone(), present_bytes).unwrap_or_default();
    let mut table = Table::new(&["change", ">capacity", ">hit", ">points"]);
    for CurvePoint { capacity_bytes, hit_ratio } in points {
        let change = match (*capacity_bytes).cmp(&present_bytes) {
            std::cmp::Ordering::Less => format!("-{}", size(present_bytes - capacity_bytes)),
            std::cmp::Ordering::Equal => "now".to_string(),
            std::cmp::Ordering::Greater => format!("+{}", size(capacity_bytes - present_bytes)),
        };
        let points = format!("{:+.1}", 100.0 * (hit_ratio - present));
        table.row([change, size(*capacity_bytes), percent(*hit_ratio), points]);
    }
    table.render("  ")
}

/// Those who ask most, each with what it hits now, could at best, and would with twice the memory.
fn namespaces(reply: &AdviseReply) -> String {
    const SHOWN: usize = 5;
    let mut table =
        Table::new(&["namespace", ">share of keys", ">hit recently", ">optimum", ">memory x 2", ">largest disk"]);
    let asked = |share: &ShareInfo| share.sampled.as_ref().map_or(0, |sampled| sampled.keys);
    let all: u64 = reply.namespaces.iter().map(asked).sum();
    let mut shares: Vec<&ShareInfo> = reply.namespaces.iter().collect();
    shares.sort_by_key(|share| std::cmp::Reverse(asked(share)));
    for share in shares.into_iter().take(SHOWN) {
        let SampledInfo { keys, hits, optimum_hits, .. } = share.sampled.unwrap_or_default();
        let at =
            |curve: &[CurvePoint], bytes: u64| curve.iter().find(|p| p.capacity_bytes == bytes).map(|p| p.hit_ratio);
        let gain = |more: Option<f64>, present: Option<f64>| match more.zip(present) {
            Some((more, present)) => format!("{:+.1}", 100.0 * (more - present)),
            None => "-".to_string(),
        };
        let largest = share.disk_curve.last().map(|point| point.hit_ratio);
        table.row([
            share.name.chars().take(16).collect(),
            percent(ratio(keys, all)),
            known(hits, keys),
            known(optimum_hits, keys),
            gain(at(&share.curve, 2 * reply.capacity_bytes), at(&share.curve, reply.capacity_bytes)),
            gain(largest, nearest(&share.disk_curve, reply.disk_bytes)),
        ]);
    }
    table.render("  ")
}

/// What a curve says of the capacity nearest to this one.
fn nearest<'a>(curve: impl IntoIterator<Item = &'a CurvePoint>, bytes: u64) -> Option<f64> {
    curve.into_iter().min_by_key(|point| point.capacity_bytes.abs_diff(bytes)).map(|point| point.hit_ratio)
}

fn to_json(reply: &AdviseReply) -> Value {
    let misses: serde_json::Map<_, _> =
        reply.misses.iter().map(|miss| (miss.reason.clone(), json!(miss.count))).collect();
    let window = |window: &WindowInfo| json!({"window_us": window.window_us, "keys": window.keys, "different_keys": window.different_keys, "ceiling": ceiling(window)});
    let point = |point: &CurvePoint| json!({"capacity_bytes": point.capacity_bytes, "hit_ratio": point.hit_ratio});
    let sampled =
        |s: &SampledInfo| json!({"keys": s.keys, "again": s.again, "hits": s.hits, "optimum_hits": s.optimum_hits});
    let share = |share: &ShareInfo| {
        json!({
            "name": share.name,
            "sampled": share.sampled.as_ref().map(sampled),
            "sampled_tiers": share.sampled_tiers.as_ref().map(sampled),
            "curve": share.curve.iter().map(point).collect::<Vec<_>>(),
            "disk_curve": share.disk_curve.iter().map(point).collect::<Vec<_>>(),
        })
    };
    let alarm = |alarm: &AlarmInfo| json!({"name": alarm.name, "cause": alarm.cause, "hint": alarm.hint});
    json!({
        "capacity_bytes": reply.capacity_bytes,
        "keys": reply.keys,
        "hits": reply.hits,
        "misses": misses,
        "stored_blocks": reply.stored_blocks,
        "evicted_blocks": reply.evicted_blocks,
        "saved_tokens": reply.saved_tokens,
        "saved_prefill_us": reply.saved_prefill_us,
        "windows": reply.windows.iter().map(window).collect::<Vec<_>>(),
        "sampled_keys": reply.sampled_keys,
        "sampled_again": reply.sampled_again,
        "sampled_hits": reply.sampled_hits,
        "sampled_optimum_hits": reply.sampled_optimum_hits,
        "curve": reply.curve.iter().map(point).collect::<Vec<_>>(),
        "all": reply.all.as_ref().map(share),
        "namespaces": reply.namespaces.iter().map(share).collect::<Vec<_>>(),
        "disk_bytes": reply.disk_bytes,
        "shared_stores": reply.shared_stores,
        "alarms": reply.alarms.iter().map(alarm).collect::<Vec<_>>(),
        "left_out": reply.left_out,
    })
}

fn ceiling(window: &WindowInfo) -> f64 {
    1.0 - (window.different_keys / window.keys.max(1) as f64).min(1.0)
}

fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// Of nothing, nothing is known.
fn known(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_string() } else { percent(ratio(part, whole)) }
}

fn percent(ratio: f64) -> String {
    format!("{:.1} %", 100.0 * ratio)
}

fn duration(us: u64) -> String {
    let minutes = us / 60_000_000;
    if minutes < 60 { format!("{minutes} min") } else { format!("{} h", minutes / 60) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply() -> AdviseReply {
        let miss = |reason: &str, count| MissCount { reason: reason.to_string(), count };
        let window = |window_us, keys, different_keys| WindowInfo { window_us, keys, different_keys };
        let point = |gib: u64, hit_ratio| CurvePoint { capacity_bytes: gib << 30, hit_ratio };
        AdviseReply {
            capacity_bytes: 100 << 30,
            keys: 1_000_000,
            hits: 410_000,
            misses: vec![
                miss("never_seen", 350_000),
                miss("evicted", 239_000),
                miss("failed", 0),
                miss("not_yet", 1000),
            ],
            stored_blocks: 580_000,
            evicted_blocks: 480_000,
            windows: vec![
                window(900_000_000, 0, 0.0),
                window(3_600_000_000, 200_000, 80_000.0),
                window(86_400_000_000, 1_000_000, 360_000.4),
            ],
            sampled_keys: 65_536,
            sampled_again: 42_000,
            sampled_hits: 27_000,
            sampled_optimum_hits: 36_000,
            curve: vec![point(50, 0.34), point(100, 0.41), point(150, 0.45), point(200, 0.48)],
            alarms: vec![AlarmInfo {
                name: "hit rate fell".to_string(),
                cause: "the working set outgrew the pool".to_string(),
                hint: "raise `pool.capacity_bytes`".to_string(),
            }],
            left_out: 3,
            all: Some(ShareInfo {
                name: "all".to_string(),
                sampled_tiers: sampled(60_000, 30_000, 37_000),
                disk_curve: vec![
                    point(0, 0.35),
                    point(100, 0.37),
                    point(400, 0.41),
                    point(1000, 0.44),
                    point(1600, 0.46),
                ],
                ..ShareInfo::default()
            }),
            namespaces: vec![
                share("0123456789abcdef0123456789abcdef", sampled(40_000, 24_000, 30_000), 0.1),
                share("others", sampled(25_536, 3000, 6000), 0.02),
                // Of which the daemon has seen nothing lately.
                ShareInfo { curve: Vec::new(), disk_curve: Vec::new(), ..share("idle", sampled(0, 0, 0), 0.0) },
            ],
            disk_bytes: 400 << 30,
            shared_stores: vec!["redis".to_string()],
            saved_tokens: 6_560_000,
            saved_prefill_us: 1_312_000_000,
        }
    }

    fn sampled(keys: u64, hits: u64, optimum_hits: u64) -> Option<SampledInfo> {
        Some(SampledInfo { keys, again: optimum_hits, hits, optimum_hits })
    }

    /// Hits so much more with twice the memory, and twice that with the largest disk.
    fn share(name: &str, sampled: Option<SampledInfo>, gain: f64) -> ShareInfo {
        let point = |gib: u64, hit_ratio| CurvePoint { capacity_bytes: gib << 30, hit_ratio };
        ShareInfo {
            name: name.to_string(),
            sampled,
            curve: vec![point(100, 0.3), point(200, 0.3 + gain)],
            disk_curve: vec![point(400, 0.3), point(1600, 0.3 + 2.0 * gain)],
            ..ShareInfo::default()
        }
    }

    #[test]
    fn the_screen_is_the_golden_one() {
        let text = to_text(&reply());
        crate::golden::assert_golden("tests/golden/advise.txt", &text);
        assert!(text.contains("+100.0 GiB") && text.contains("+7.0"));
        assert!(text.contains("+1.2 TiB") && text.contains("with the present disk") && text.contains("others"));
        assert!(text.lines().count() <= 48, "more than one screen");
        assert_eq!(to_text(&AdviseReply::default()), "no engine has looked up a block yet\n");
    }

    #[test]
    fn the_plot_says_what_is_here_and_what_a_step_more_would_hit() {
        let panels = plot::panels(&reply()).unwrap();
        let notes: Vec<_> = panels.iter().flat_map(|panel| &panel.notes).map(|note| note.text.as_str()).collect();
        assert_eq!(notes, ["here: 41.0 %", "+50.0 GiB: 45.0 %", "here: 41.0 %", "+600.0 GiB: 44.0 %"]);
        let without_disk = plot::panels(&AdviseReply { all: None, disk_bytes: 0, ..reply() }).unwrap();
        assert_eq!(without_disk.iter().map(|panel| panel.title.as_str()).collect::<Vec<_>>(), ["memory"]);
        let few = plot::panels(&AdviseReply { keys: 2, ..reply() }).err().expect("it is refused");
        assert!(few.to_string().contains("too little traffic"), "{few}");
    }

    #[test]
    fn no_sizes_are_compared_on_too_little_traffic() {
        let text = to_text(&AdviseReply { keys: 2, hits: 1, ..reply() });
        assert!(
            text.contains("too little traffic yet to estimate other sizes of memory and disk: 2 keys of 10000"),
            "{text}"
        );
        assert!(!text.contains("points") && !text.contains("memory x 2"), "{text}");
    }

    #[test]
    fn nothing_is_said_of_a_sample_without_keys() {
        let text = to_text(&AdviseReply { sampled_keys: 0, ..reply() });
        assert!(text.contains("all keys since") && !text.contains("a sample of recent keys"), "{text}");
    }

    #[test]
    fn json_tells_the_same_and_misses_add_up() {
        let json = to_json(&reply());
        let misses: u64 = json["misses"].as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(misses + json["hits"].as_u64().unwrap(), json["keys"].as_u64().unwrap());
        assert_eq!(json["curve"][3]["capacity_bytes"], 200u64 << 30);
        assert_eq!(json["all"]["disk_curve"][4]["hit_ratio"], 0.46);
        assert_eq!(json["namespaces"][1]["sampled"]["hits"], 3000);
        assert_eq!(json["windows"][1]["ceiling"], 0.6);
        assert_eq!(json["alarms"][0]["name"], "hit rate fell");
    }
}
