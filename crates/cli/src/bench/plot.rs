//! The rows of a benchmark as a picture: a panel for each operation or direction, against the size of what was moved.

use forebay_sim::chart::{Axis, Kind, Line, Panel, Scale};

use crate::output::size;

/// A row's value in a panel, on a line; lines of the same name are one.
pub struct Point {
    pub panel: String,
    pub line: String,
    /// The line that a baseline is compared with.
    pub baseline_of: Option<String>,
    pub x: f64,
    pub y: f64,
}

impl Point {
    /// What was measured at one size, and its baseline beside it.
    pub fn pair(panel: &str, line: &str, size_bytes: u64, own: f64, baseline: (&str, f64)) -> [Point; 2] {
        let point = |line: &str, baseline_of, y| Point {
            panel: panel.to_owned(),
            line: line.to_owned(),
            baseline_of,
            x: size_bytes as f64,
            y,
        };
        [point(line, None, own), point(baseline.0, Some(line.to_owned()), baseline.1)]
    }
}

/// Throughput against the size of a block or segment.
pub fn throughput(points: Vec<Point>, what: &str) -> Vec<Panel> {
    let x = || Axis { label: format!("bytes of a {what}"), text: |bytes| size(bytes as u64).replace(".0 ", " ") };
    panels(points, x, || Axis { label: "GB/s".to_owned(), text: |value| format!("{}", rounded(value)) })
}

/// Time against the keys of a lookup.
pub fn latency(points: Vec<Point>) -> Vec<Panel> {
    let x = || Axis { label: "keys of a lookup".to_owned(), text: |keys| format!("{keys}") };
    panels(points, x, || Axis { label: "time, us".to_owned(), text: |value| format!("{}", rounded(value)) })
}

/// Panels, and the colours of lines, in the order in which they come.
fn panels(points: Vec<Point>, x: impl Fn() -> Axis, y: impl Fn() -> Axis) -> Vec<Panel> {
    let mut colours: Vec<String> = Vec::new();
    let mut panels: Vec<Panel> = Vec::new();
    for Point { panel, line, baseline_of, x: at, y: value } in points {
        let own = baseline_of.as_ref().unwrap_or(&line);
        let colour = colours.iter().position(|name| name == own).unwrap_or_else(|| {
            colours.push(own.clone());
            colours.len() - 1
        });
        let place = panels.iter().position(|known| known.title == panel).unwrap_or_else(|| {
            let lines = Vec::new();
            let notes = Vec::new();
            panels.push(Panel { title: panel, scale: Scale::Logarithm, x: x(), y: y(), most: f64::MAX, lines, notes });
            panels.len() - 1
        });
        let lines = &mut panels[place].lines;
        let is_same = |known: &Line| match known.kind {
            Kind::Baseline(of) => baseline_of.is_some() && of == colour && known.label == line,
            _ => baseline_of.is_none() && known.label == line,
        };
        match lines.iter().position(is_same) {
            Some(at_line) => lines[at_line].points.push((at, value)),
            None => {
                let kind = if baseline_of.is_some() { Kind::Baseline(colour) } else { Kind::Own(colour) };
                lines.push(Line { label: line, kind, points: vec![(at, value)] });
            }
        }
    }
    // Rows may come in any order of sizes.
    let lines = panels.iter_mut().flat_map(|panel| &mut panel.lines);
    lines.for_each(|line| line.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    panels
}

/// Without the digits that sums of steps leave behind.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_one_line_are_joined_by_size_and_each_depth_has_its_baseline() {
        let points = [("read", 1, 64), ("read", 8, 64), ("write", 1, 64), ("read", 1, 4)].map(|(panel, depth, kib)| {
            Point::pair(panel, &format!("depth {depth}"), kib << 10, depth as f64, ("fio", 0.5))
        });
        let panels = throughput(points.into_iter().flatten().collect(), "block");
        let told: Vec<_> = panels.iter().map(|panel| (panel.title.as_str(), panel.lines.len())).collect();
        assert_eq!(told, [("read", 4), ("write", 2)]);
        let first = &panels[0].lines[0];
        assert_eq!((first.label.as_str(), &first.points[..]), ("depth 1", &[(4096.0, 1.0), (65536.0, 1.0)][..]));
        let baselines: Vec<_> = panels[0].lines.iter().filter(|line| matches!(line.kind, Kind::Baseline(_))).collect();
        assert_eq!(baselines.len(), 2);
    }
}
