//! Lines of styled text, and how figures are told on them.

use forebay_rpc::proto::FrameReply;

use crate::output::{Colour, painted, size};

/// What a piece of a line is to the eye. Without colours nothing is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Style {
    Plain,
    Title,
    Good,
    Warn,
    Bad,
}

/// Pieces, left to right.
#[derive(Clone, Default, Debug)]
pub struct Line(Vec<(Style, String)>);

impl Line {
    pub fn plain(text: impl Into<String>) -> Line {
        Line(vec![(Style::Plain, text.into())])
    }

    pub fn styled(style: Style, text: impl Into<String>) -> Line {
        Line(vec![(style, text.into())])
    }

    pub fn and(mut self, style: Style, text: impl Into<String>) -> Line {
        self.0.push((style, text.into()));
        self
    }

    pub fn len(&self) -> usize {
        self.0.iter().map(|(_, text)| text.chars().count()).sum()
    }

    /// So wide, with a blank at least, and the other one behind it.
    pub fn beside(self, width: usize, other: Line) -> Line {
        let mut left = self.clipped(width.saturating_sub(1));
        let blanks = width.saturating_sub(left.len());
        left.0.push((Style::Plain, " ".repeat(blanks)));
        left.0.extend(other.0);
        left
    }

    /// As several lines, each no longer than that: the last piece goes on behind `indent` blanks.
    pub fn wrapped(mut self, width: usize, indent: usize) -> Vec<Line> {
        let Some((style, text)) = self.0.pop() else { return vec![self] };
        let (mut lines, mut at) = (Vec::new(), self.len());
        let mut fitting = String::new();
        for word in text.split_inclusive(' ') {
            let len = word.trim_end().chars().count();
            if at + len > width && !fitting.is_empty() {
                self.0.push((style, std::mem::take(&mut fitting)));
                lines.push(std::mem::replace(&mut self, Line::plain(" ".repeat(indent))));
                at = indent;
            }
            fitting += word;
            at += word.chars().count();
        }
        lines.push(self.and(style, fitting));
        lines
    }

    /// No longer than that.
    pub fn clipped(self, width: usize) -> Line {
        let mut left = width;
        let pieces = self.0.into_iter().map(|(style, text)| {
            let text: String = text.chars().take(left).collect();
            left -= text.chars().count();
            (style, text)
        });
        Line(pieces.collect())
    }

    /// Without blanks at its end.
    pub fn to_text(&self) -> String {
        self.0.iter().map(|(_, text)| text.as_str()).collect::<String>().trim_end().to_owned()
    }

    pub fn to_codes(&self) -> String {
        self.0.iter().map(|(style, text)| style.paint(text)).collect()
    }
}

impl Style {
    fn paint(self, text: &str) -> String {
        match self {
            Style::Plain => text.to_owned(),
            Style::Title => painted(text, Colour::Cyan),
            Style::Good => painted(text, Colour::Green),
            Style::Warn => painted(text, Colour::Yellow),
            Style::Bad => painted(text, Colour::Red),
        }
    }
}

/// A heading before a column begins with `>` if the column is to the right.
pub struct Column {
    pub head: &'static str,
    pub width: usize,
}

/// A row of cells, each as wide as its column, two blanks between them.
pub fn row(columns: &[Column], cells: &[String]) -> String {
    let cell = |(column, cell): (&Column, &String)| {
        let (width, text) = (column.width, cell.chars().take(column.width).collect::<String>());
        if column.head.starts_with('>') { format!("{text:>width$}") } else { format!("{text:<width$}") }
    };
    columns.iter().zip(cells).map(cell).collect::<Vec<_>>().join("  ")
}

pub fn heads(columns: &[Column]) -> Line {
    let heads: Vec<String> = columns.iter().map(|column| column.head.trim_start_matches('>').to_owned()).collect();
    Line::styled(Style::Title, row(columns, &heads))
}

/// `41.2 %`; a dash if there is none.
pub fn percent(ratio: Option<f64>) -> String {
    ratio.filter(|ratio| ratio.is_finite()).map_or("-".to_owned(), |ratio| format!("{:.1} %", 100.0 * ratio))
}

/// `812`, `48.1 k`, `4.8 M`.
pub fn count(count: f64) -> String {
    match count {
        ..10.0 if count > 0.0 => format!("{count:.1}"),
        ..10_000.0 => format!("{count:.0}"),
        ..10_000_000.0 => format!("{:.1} k", count / 1e3),
        ..10_000_000_000.0 => format!("{:.1} M", count / 1e6),
        _ => format!("{:.1} G", count / 1e9),
    }
}

/// `1.4 GiB/s`; a dash for nothing.
pub fn speed(bytes_per_second: f64) -> String {
    if bytes_per_second < 1.0 { "-".to_owned() } else { format!("{}/s", size(bytes_per_second as u64)) }
}

/// `0.31 ms`, `6.2 ms`, `1.4 s`; a dash if there is none.
pub fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(seconds) if seconds < 0.001 => format!("{:.2} ms", 1e3 * seconds),
        Some(seconds) if seconds < 1.0 => format!("{:.1} ms", 1e3 * seconds),
        Some(seconds) => format!("{seconds:.1} s"),
    }
}

/// The time of day of the frame, in UTC.
pub fn clock(frame: &FrameReply) -> String {
    let second = frame.at_ms / 1000 % 86_400;
    format!("{:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stay_short_and_what_is_unknown_is_a_dash() {
        assert_eq!([0.0, 0.2, 9999.0, 48_120.0, 48e6].map(count), ["0", "0.2", "9999", "48.1 k", "48.0 M"]);
        assert_eq!([None, Some(f64::NAN), Some(0.4123)].map(percent), ["-", "-", "41.2 %"]);
        assert_eq!([None, Some(0.00031), Some(0.0062), Some(1.44)].map(time), ["-", "0.31 ms", "6.2 ms", "1.4 s"]);
        assert_eq!([0.0, 2048.0].map(speed), ["-", "2.0 KiB/s"]);
    }

    #[test]
    fn a_line_is_clipped_across_its_pieces_and_coloured_without_a_change_of_its_text() {
        let line = Line::plain("ab").and(Style::Bad, "cdef").clipped(4);
        assert_eq!((line.to_text(), line.len()), ("abcd".to_owned(), 4));
        assert_eq!(line.to_codes(), "ab\x1b[31mcd\x1b[0m");
        assert_eq!(Line::plain("a").beside(3, Line::plain("b")).to_text(), "a  b");
    }
}
