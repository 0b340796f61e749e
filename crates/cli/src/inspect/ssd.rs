//! `forebay inspect ssd`: what a disk says of itself while no daemon uses it.

use std::collections::BTreeMap;
use std::path::Path;

use forebay_core::{Error, ErrorKind};
use forebay_io::ssd::{Audit, DiskReport, Inspection, SegmentReport, SegmentState};
use serde_json::{Value, json};

use crate::arguments::InspectSsd;
use crate::failure::Failure;
use crate::output::{Table, counted, print, print_json, size, was};

pub fn run(arguments: &InspectSsd) -> Result<(), Failure> {
    let (mut all, mut failure) = (Vec::new(), None);
    for path in &arguments.paths {
        let look = look(path, arguments.audit)?;
        if !arguments.json {
            print(&to_text(&look, arguments.segments));
        }
        all.push(to_json(&look));
        failure = failure.or_else(|| damage(&look));
    }
    if arguments.json {
        print_json(&json!({"disks": all}));
    }
    failure.map_or(Ok(()), |error| Err(error.into()))
}

/// What an audit has found wrong.
fn damage(Look { report, audit, .. }: &Look) -> Option<Error> {
    let (blocks, recovery) = (audit.as_ref()?.damaged_blocks, report.recovery);
    let (what, hint) = match recovery.damaged_purge_pages.iter().sum() {
        _ if blocks > 0 => ("blocks of a disk are damaged", "look for errors of this disk in the kernel's log"),
        0u32 => return None,
        _ if recovery.lost_purge_pages > 0 => (
            "a disk's list of purges is damaged in both copies",
            "purge again what was purged lately: if the disk's log is damaged too, its blocks may be back",
        ),
        _ => (
            "a copy of a disk's list of purges is damaged",
            "start the daemon: it writes the list again, from the other copy",
        ),
    };
    Some(Error::new(ErrorKind::Corrupt, what).with("disk", &report.name).hint(hint))
}

struct Look {
    report: DiskReport,
    segments: Vec<SegmentReport>,
    audit: Option<Audit>,
}

fn look(path: &Path, wants_audit: bool) -> Result<Look, Failure> {
    let mut inspection = Inspection::open(path)?;
    let audit = if wants_audit { Some(inspection.audit()?) } else { None };
    Ok(Look { report: inspection.report(), segments: inspection.segments(), audit })
}

fn to_text(look: &Look, wants_segments: bool) -> String {
    let Look { report, audit, .. } = look;
    let mut table = Table::new(&["disk", &report.name]);
    let capacity_bytes = report.geometry.segment_bytes * u64::from(report.geometry.segments);
    let amplification = report.lifetime_amplification().map_or("-".to_string(), |ratio| format!("{ratio:.2}"));
    let recovery = report.recovery;
    let rows = [
        ("id", format!("{:032x}", report.geometry.id)),
        ("capacity", size(capacity_bytes)),
        (
            "live",
            format!(
                "{} in {} are in use, {:.2} of the capacity",
                size(report.live_bytes),
                counted(report.blocks, "block"),
                report.live_ratio()
            ),
        ),
        ("written", format!("{} were written since the disk was formatted", size(report.lifetime_written_bytes))),
        ("amplification", amplification),
        ("segments", states(look)),
        (
            "lost",
            format!(
                "{} and {} could not be read",
                counted(recovery.blocks_not_whole, "block"),
                counted(u64::from(recovery.segments_lost), "segment")
            ),
        ),
        ("purges", {
            let [first, second] = recovery.damaged_purge_pages;
            let namespaces = counted(recovery.purges, "namespace");
            format!("{namespaces} in the list; damaged pages: {first} in the first copy, {second} in the second")
        }),
    ];
    rows.into_iter().for_each(|(name, value)| table.row([name.to_string(), value]));
    if let Some(audit) = audit {
        let Audit { blocks, bytes, damaged_blocks, .. } = audit;
        table.row([
            "audit".to_string(),
            format!(
                "{}, {}, {} read; damaged: {damaged_blocks}",
                counted(*blocks, "block"),
                size(*bytes),
                was(*blocks)
            ),
        ]);
    }
    let text = table.render("");
    if wants_segments { text + "\n" + &segments(&look.segments) } else { text }
}

/// How many segments are in each state.
fn states(Look { report, segments, .. }: &Look) -> String {
    let mut counts = BTreeMap::new();
    segments.iter().for_each(|segment| *counts.entry(state(segment.state)).or_insert(0u32) += 1);
    let counts = counts.into_iter().map(|(state, count)| format!("{count} {state}")).collect::<Vec<_>>().join(", ");
    format!("{} of {}: {counts}", segments.len(), size(report.geometry.segment_bytes))
}

fn segments(segments: &[SegmentReport]) -> String {
    let mut table = Table::new(&[">segment", "state", ">age", ">used", ">live", ">blocks"]);
    for segment in segments {
        table.row([
            segment.index.to_string(),
            state(segment.state).to_string(),
            size(segment.age_bytes),
            size(segment.used_bytes),
            size(segment.live_bytes),
            segment.live_blocks.to_string(),
        ]);
    }
    table.render("  ")
}

fn state(state: SegmentState) -> &'static str {
    match state {
        SegmentState::Free => "free",
        SegmentState::Erasing => "erasing",
        SegmentState::Ready => "ready",
        SegmentState::Active => "active",
        SegmentState::Closing => "closing",
        SegmentState::Closed => "closed",
    }
}

fn to_json(Look { report, segments, audit }: &Look) -> Value {
    let segment = |segment: &SegmentReport| {
        json!({
            "segment": segment.index,
            "state": state(segment.state),
            "age_bytes": segment.age_bytes,
            "used_bytes": segment.used_bytes,
            "live_bytes": segment.live_bytes,
            "live_blocks": segment.live_blocks,
        })
    };
    json!({
        "disk": report.name,
        "id": format!("{:032x}", report.geometry.id),
        "segment_bytes": report.geometry.segment_bytes,
        "blocks": report.blocks,
        "live_bytes": report.live_bytes,
        "lifetime_written_bytes": report.lifetime_written_bytes,
        "lifetime_amplification": report.lifetime_amplification(),
        "blocks_not_whole": report.recovery.blocks_not_whole,
        "segments_lost": report.recovery.segments_lost,
        "purges": report.recovery.purges,
        "damaged_purge_pages": report.recovery.damaged_purge_pages,
        "lost_purge_pages": report.recovery.lost_purge_pages,
        "recovery_us": report.recovery.took_us,
        "segments": segments.iter().map(segment).collect::<Vec<_>>(),
        "audit": audit.as_ref().map(|audit| json!({
            "blocks": audit.blocks,
            "bytes": audit.bytes,
            "damaged_blocks": audit.damaged_blocks,
            "damaged": audit.damaged.iter().map(|key| format!("{}/{}/{}", key.namespace, key.group, key.hash)).collect::<Vec<_>>(),
        })),
    })
}
