//! Line charts as SVG: panels in rows of at most three, each with its axes and a legend of its own.
//!
//! Values start at zero. The first axis has a tick at each value that a line has there, as far as there is room.

use std::fmt::Write;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser};
use forebay_core::{Error, ErrorKind, Result};

const PANEL: (f64, f64) = (340.0, 240.0);
const LEFT: f64 = 62.0;
const TOP: f64 = 52.0;
const RIGHT: f64 = 28.0;
/// Below the panel: ticks, the axis' label, and the first line of the legend.
const BELOW: f64 = 50.0;
const LEGEND_LINE: f64 = 15.0;
const COLUMNS: usize = 3;
/// At least as wide as a character of the font, on average.
const CHARACTER: f64 = 6.4;
/// Distinguishable with colour blindness (Okabe and Ito); dashes repeat the information.
const COLOURS: [&str; 6] = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES: [&str; 6] = ["", "6 2", "1 2", "8 2 2 2", "4 4", "3 1"];
const BOUND: &str = "#444444";

/// Where a value of the first axis stands.
#[derive(Clone, Copy)]
pub enum Scale {
    /// Equal factors are equally far apart; for values above zero.
    Logarithm,
    /// From zero on, with more room for what is small.
    Root,
}

pub struct Axis {
    pub label: String,
    /// A value of the axis, in words.
    pub text: fn(f64) -> String,
}

pub enum Kind {
    /// What the picture is about, in the colour of this number.
    Own(usize),
    /// What the line of this colour is compared with.
    Baseline(usize),
    /// A part of what the line of this colour shows; not in the legend.
    Part(usize),
    /// What no line can pass, with these dashes.
    Bound(&'static str),
}

pub struct Line {
    pub label: String,
    pub kind: Kind,
    pub points: Vec<(f64, f64)>,
}

/// A point with words beside it.
pub struct Note {
    pub point: (f64, f64),
    pub text: String,
    /// Words below the point are right of it, words above it left of it, where a rising curve leaves room.
    pub is_below: bool,
}

pub struct Panel {
    pub title: String,
    pub scale: Scale,
    pub x: Axis,
    pub y: Axis,
    /// No value of the second axis is above this.
    pub most: f64,
    pub lines: Vec<Line>,
    pub notes: Vec<Note>,
}

/// Reads the name of a plot from the command line. A picture under the name of another kind opens nowhere.
pub fn file() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.extension().is_some_and(|ending| ending == "svg") {
        true => Ok(path),
        false => Err("give a name that ends in `.svg`: the plot is SVG"),
    })
}

/// Writes an SVG file.
pub fn write(path: &Path, panels: &[Panel]) -> Result<()> {
    std::fs::write(path, svg(panels)).map_err(|error| cannot_write(path, error))
}

/// Whether the file can be written, before a long measurement: what is there stays as it is.
pub fn check(path: &Path) -> Result<()> {
    let is_new = !path.exists();
    let opened = File::options().append(true).create(true).open(path);
    let checked = opened.and_then(|_| if is_new { std::fs::remove_file(path) } else { Ok(()) });
    checked.map_err(|error| cannot_write(path, error))
}

fn cannot_write(path: &Path, error: io::Error) -> Error {
    let error = Error::new(ErrorKind::Io, "cannot write plot").with("path", path.display()).source(error);
    error.hint("name a file in a directory that is there and to which this user may write")
}

fn svg(panels: &[Panel]) -> String {
    let legends: Vec<_> = panels.iter().map(Panel::legend).collect();
    let lines = legends.iter().map(Vec::len).max().unwrap_or(0) as f64;
    let (across, down) = (LEFT + PANEL.0 + RIGHT, TOP + PANEL.1 + BELOW + LEGEND_LINE * lines);
    let columns = panels.len().clamp(1, COLUMNS);
    let (width, height) = (across * columns as f64, down * panels.len().div_ceil(columns) as f64);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (at, (panel, legend)) in panels.iter().zip(&legends).enumerate() {
        let left = LEFT + across * (at % columns) as f64;
        let top = TOP + down * (at / columns) as f64;
        Drawing::new(panel, left, top).draw(legend, &mut text);
    }
    text + "</svg>\n"
}

impl Panel {
    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.lines.iter().flat_map(|line| line.points.iter().copied())
    }

    /// Each label once, with where it begins, in lines as wide as the panel.
    fn legend(&self) -> Vec<Vec<(f64, &Line)>> {
        let mut placed: Vec<Vec<(f64, &Line)>> = Vec::new();
        let mut from = f64::MAX;
        for (at, line) in self.lines.iter().enumerate() {
            let is_told = self.lines[..at].iter().any(|other| other.label == line.label);
            if is_told || matches!(line.kind, Kind::Part(_)) {
                continue;
            }
            let wide = 27.0 + CHARACTER * line.label.chars().count() as f64;
            if from + wide > PANEL.0 + RIGHT {
                placed.push(Vec::new());
                from = 0.0;
            }
            placed.last_mut().expect("a line has begun").push((from, line));
            from += wide + 10.0;
        }
        placed
    }
}

/// A panel and its place.
struct Drawing<'a> {
    panel: &'a Panel,
    left: f64,
    top: f64,
    /// The ends of the first axis, scaled.
    ends: (f64, f64),
    highest: f64,
}

impl Drawing<'_> {
    fn new(panel: &Panel, left: f64, top: f64) -> Drawing<'_> {
        let scaled = panel.points().map(|(x, _)| scaled(panel.scale, x));
        let (low, high) = scaled.fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
        let ends = match panel.scale {
            Scale::Root => (0.0, high.max(1.0)),
            Scale::Logarithm if high > low => (low, high),
            Scale::Logarithm => (low - 1.0, low + 1.0),
        };
        let highest = panel.points().map(|(_, y)| y).fold(0.0, f64::max);
        let highest = if highest > 0.0 { (highest * 1.08).min(panel.most) } else { panel.most.min(1.0) };
        Drawing { panel, left, top, ends, highest }
    }

    fn x(&self, value: f64) -> f64 {
        self.left + (scaled(self.panel.scale, value) - self.ends.0) / (self.ends.1 - self.ends.0) * PANEL.0
    }

    fn y(&self, value: f64) -> f64 {
        self.top + PANEL.1 * (1.0 - value / self.highest)
    }

    fn draw(&self, legend: &[Vec<(f64, &Line)>], text: &mut String) {
        let Panel { title, lines, notes, .. } = self.panel;
        words(text, (self.left, self.top - 32.0), "start", " font-size=\"13\" font-weight=\"bold\"", title);
        self.axes(text);
        lines.iter().for_each(|line| self.line(line, text));
        notes.iter().for_each(|note| self.note(note, text));
        for (row, entries) in legend.iter().enumerate() {
            let y = self.top + PANEL.1 + BELOW + LEGEND_LINE * row as f64;
            for (from, line) in entries {
                let x = self.left + from;
                let _ = writeln!(text, "<path d=\"M{x:.1} {y:.1}h22\" {}/>", stroke(line, true));
                words(text, (x + 27.0, y + 4.0), "start", "", &line.label);
            }
        }
    }

    fn axes(&self, text: &mut String) {
        let Panel { x, y, .. } = self.panel;
        let (right, bottom) = (self.left + PANEL.0, self.top + PANEL.1);
        words(text, (self.left, self.top - 12.0), "start", "", &y.label);
        let step = step(self.highest);
        for n in 0..=(self.highest / step + 1e-9) as usize {
            let (value, at) = (n as f64 * step, self.y(n as f64 * step));
            let _ = writeln!(text, "<path d=\"M{:.1} {at:.1}H{right:.1}\" stroke=\"#e0e0e0\"/>", self.left);
            words(text, (self.left - 6.0, at + 4.0), "end", "", &(y.text)(value));
        }
        let mut values: Vec<f64> = self.panel.points().map(|(x, _)| x).collect();
        values.sort_by(f64::total_cmp);
        let mut free = f64::MIN;
        for value in values {
            let (at, label) = (self.x(value), (x.text)(value));
            let half = CHARACTER * label.chars().count() as f64 / 2.0;
            if at - half < free {
                continue;
            }
            free = at + half + 6.0;
            words(text, (at, bottom + 15.0), "middle", "", &label);
        }
        let _ = writeln!(
            text,
            "<path d=\"M{:.1} {:.1}V{bottom:.1}H{right:.1}\" fill=\"none\" stroke=\"#888888\"/>",
            self.left, self.top
        );
        words(text, (self.left + PANEL.0 / 2.0, bottom + 31.0), "middle", "", &x.label);
    }

    fn line(&self, line: &Line, text: &mut String) {
        let places: Vec<_> = line.points.iter().map(|(x, y)| (self.x(*x), self.y(*y))).collect();
        let points: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(text, "<polyline points=\"{}\" fill=\"none\" {}/>", points.join(" "), stroke(line, false));
        if let Kind::Own(colour) = line.kind {
            for (x, y) in places {
                let fill = COLOURS[colour % COLOURS.len()];
                let _ = writeln!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.4\" fill=\"{fill}\"/>");
            }
        }
    }

    fn note(&self, note: &Note, text: &mut String) {
        let (x, y) = (self.x(note.point.0), self.y(note.point.1));
        let _ = writeln!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4.5\" fill=\"{BOUND}\"/>");
        let share = (x - self.left) / PANEL.0;
        let is_right = if note.is_below { share < 0.6 } else { share < 0.4 };
        let (side, anchor) = if is_right { (8.0, "start") } else { (-8.0, "end") };
        let lower = if note.is_below { 18.0 } else { -10.0 };
        words(text, (x + side, y + lower), anchor, " font-weight=\"bold\"", &note.text);
    }
}

fn scaled(scale: Scale, value: f64) -> f64 {
    match scale {
        Scale::Logarithm => value.max(1e-9).ln(),
        Scale::Root => value.max(0.0).sqrt(),
    }
}

/// The least of 1, 2 or 5 times a power of ten that has six steps at most below `highest`.
fn step(highest: f64) -> f64 {
    let power = 10_f64.powf((highest / 6.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|step| highest / step <= 6.0).unwrap_or(highest)
}

/// In the legend a baseline has no colour: it stands for those of all lines.
fn stroke(line: &Line, is_legend: bool) -> String {
    let of = |colour: usize| COLOURS[colour % COLOURS.len()];
    let (colour, width, dash) = match line.kind {
        Kind::Own(colour) => (of(colour), 1.8, DASHES[colour % DASHES.len()]),
        Kind::Baseline(colour) => (if is_legend { BOUND } else { of(colour) }, 1.2, "2 4"),
        Kind::Part(colour) => (of(colour), 0.7, ""),
        Kind::Bound(dash) => (BOUND, 1.8, dash),
    };
    format!("stroke=\"{colour}\" stroke-width=\"{width}\" stroke-dasharray=\"{dash}\"")
}

fn words(text: &mut String, (x, y): (f64, f64), anchor: &str, more: &str, what: &str) {
    let what = what.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(text, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"{more}>{what}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(points: &[(f64, f64)]) -> Panel {
        let axis = |label: &str| Axis { label: label.to_owned(), text: |value| format!("{value}") };
        let line = Line { label: "a < b".to_owned(), kind: Kind::Own(0), points: points.to_vec() };
        let (x, y) = (axis("size"), axis("speed"));
        let title = "one".to_owned();
        Panel { title, scale: Scale::Logarithm, x, y, most: f64::MAX, lines: vec![line], notes: Vec::new() }
    }

    #[test]
    fn every_number_of_the_picture_is_one_whatever_was_measured() {
        for points in [&[(4.0, 0.0)][..], &[(4.0, 2.0)], &[(4.0, 2.0), (64.0, 9e9)], &[(1.0, 1e-9), (1.0, 1e-9)], &[]] {
            for scale in [Scale::Logarithm, Scale::Root] {
                let text = svg(&[Panel { scale, ..panel(points) }]);
                assert!(!text.contains("NaN") && !text.contains("inf"), "{points:?}:\n{text}");
                assert!(text.matches("<text").count() < 30, "{points:?}:\n{text}");
            }
        }
        assert!(svg(&[]).starts_with("<svg"));
    }

    #[test]
    fn names_are_text_and_a_fourth_panel_begins_a_row() {
        let panels: Vec<Panel> = (0..4).map(|_| panel(&[(1.0, 1.0), (2.0, 2.0)])).collect();
        let text = svg(&panels);
        assert!(text.contains("a &lt; b") && !text.contains("a < b"));
        assert!(text.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1290\" height=\"714\""), "{text}");
    }

    #[test]
    fn steps_are_round_and_few() {
        for (highest, wanted) in [(1.0, 0.2), (6.0, 1.0), (0.43, 0.1), (0.05, 0.01), (2500.0, 500.0), (13.0, 5.0)] {
            assert!((step(highest) - wanted).abs() < 1e-9 * wanted, "{highest}: {}", step(highest));
        }
    }
}
