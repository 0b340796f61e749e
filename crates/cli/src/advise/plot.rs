//! What more memory and disk would buy, as a picture: here you are, and that much more is there.

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::proto::{AdviseReply, CurvePoint};
use forebay_sim::chart::{Axis, Kind, Line, Note, Panel, Scale};

use super::LEAST_KEYS;
use crate::output::size;

/// A step that somebody would buy: half as large again.
const STEP: f64 = 1.5;

/// A panel for memory, and one for disk.
pub fn panels(reply: &AdviseReply) -> Result<Vec<Panel>> {
    let disk = reply.all.as_ref().map_or(&[][..], |all| &all.disk_curve);
    let memory_title = if reply.disk_bytes > 0 { "memory, with the present disk" } else { "memory" };
    let curves = [
        (memory_title, &reply.curve[..], reply.capacity_bytes),
        ("disk, with the present memory", disk, reply.disk_bytes),
    ];
    let panels: Vec<Panel> = curves.into_iter().filter_map(|(title, curve, here)| panel(title, curve, here)).collect();
    if reply.keys < LEAST_KEYS || panels.is_empty() {
        return Err(Error::new(ErrorKind::Unavailable, "there is too little traffic yet to plot other sizes")
            .with("keys", reply.keys)
            .hint(format!("ask again when {LEAST_KEYS} keys were looked up")));
    }
    Ok(panels)
}

/// None without two sizes to compare.
fn panel(title: &str, curve: &[CurvePoint], present_bytes: u64) -> Option<Panel> {
    let mut sizes = curve.to_vec();
    sizes.sort_by_key(|point| point.capacity_bytes);
    let here = *sizes.iter().min_by_key(|point| point.capacity_bytes.abs_diff(present_bytes))?;
    let larger = || sizes.iter().filter(|point| point.capacity_bytes > here.capacity_bytes);
    let is_step = |point: &&CurvePoint| point.capacity_bytes as f64 >= STEP * here.capacity_bytes as f64;
    let there = larger().find(is_step).or_else(|| larger().next_back());
    if sizes.len() < 2 {
        return None;
    }
    let place = |point: &CurvePoint| (point.capacity_bytes as f64, point.hit_ratio);
    let mut notes = vec![Note { point: place(&here), text: told("here", here), is_below: true }];
    notes.extend(there.map(|there| {
        let more = format!("+{}", size(there.capacity_bytes - here.capacity_bytes));
        Note { point: place(there), text: told(&more, *there), is_below: false }
    }));
    Some(Panel {
        title: title.to_owned(),
        scale: Scale::Root,
        x: Axis {
            label: "size".to_owned(),
            text: |bytes| if bytes == 0.0 { "none".to_owned() } else { size(bytes as u64) },
        },
        y: Axis { label: "hit rate".to_owned(), text: |ratio| format!("{:.0} %", 100.0 * ratio) },
        most: 1.0,
        lines: vec![Line {
            label: "hits, estimated from a sample of recent keys".to_owned(),
            kind: Kind::Own(1),
            points: sizes.iter().map(place).collect(),
        }],
        notes,
    })
}

fn told(what: &str, point: CurvePoint) -> String {
    format!("{what}: {:.1} %", 100.0 * point.hit_ratio)
}
