//! What commands print: tables of fixed width, sizes people can read, and JSON with the same facts.

use std::io::{self, ErrorKind, IsTerminal, Write};

use serde_json::Value;

pub use forebay_core::size::human as size;

/// Writes to standard output. Whoever closed it (`forebay inspect | head`) has read enough, so that is no error; an
/// answer that is not there for another reason ends the command.
pub fn print(text: &str) {
    print_bytes(text.as_bytes());
}

/// As [`print`], of one text among many. False once nobody reads any more.
pub fn print_next(text: &str) -> bool {
    print_bytes(text.as_bytes())
}

/// See [`print`]. False if nobody reads any more.
pub fn print_bytes(bytes: &[u8]) -> bool {
    let mut out = std::io::stdout().lock();
    end_unless(out.write_all(bytes).and_then(|()| out.flush()))
}

/// A line to standard error on what goes on. Nothing depends on it, so it may be lost.
pub fn note(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// As [`print`], in the terminal's colours.
pub fn print_help(help: &clap::Error) {
    end_unless(help.print().and_then(|()| std::io::stdout().flush()));
}

/// False if nobody reads any more.
fn end_unless(written: io::Result<()>) -> bool {
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            let _ = writeln!(std::io::stderr(), "error: cannot write the answer: {error}");
            std::process::exit(1)
        }
        Ok(()) => true,
        Err(_) => false,
    }
}

/// One object, names in alphabetical order.
pub fn print_json(value: &Value) {
    print(&json(value));
}

/// As [`print_json`] prints it: what a terminal could take for a command, or for another order of letters, is escaped.
pub fn json(value: &Value) -> String {
    // Such letters stand in strings only, where any letter can be written as its number.
    format!("{value:#}\n").chars().fold(String::new(), |told, letter| {
        let is_plain = matches!(letter, '\n' | '"' | '\'' | '\\') || letter.escape_debug().count() == 1;
        if is_plain {
            return told + letter.encode_utf8(&mut [0; 4]);
        }
        letter.encode_utf16(&mut [0; 2]).iter().fold(told, |told, unit| told + &format!("\\u{unit:04x}"))
    })
}

/// Whether what goes to `stream` is coloured: on a terminal that has colours, unless `NO_COLOR` is set
/// (https://no-color.org).
pub fn is_coloured(stream: &impl IsTerminal) -> bool {
    has_control_codes(stream) && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Whether `stream` is a terminal that understands more than text; a dumb one does not.
pub fn has_control_codes(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("TERM").is_some_and(|name| name != "dumb")
}

/// Of a word that is to be seen first.
#[derive(Clone, Copy)]
pub enum Colour {
    Red = 31,
    Green = 32,
    Yellow = 33,
    Cyan = 36,
}

pub fn painted(text: &str, colour: Colour) -> String {
    format!("\x1b[{}m{text}\x1b[0m", colour as u8)
}

/// `1 block`, `20 blocks`.
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// `was` or `were`, after a subject of so many.
pub fn was(count: u64) -> &'static str {
    if count == 1 { "was" } else { "were" }
}

/// `12345 tokens, at least 6.7 s of prefill`, of tokens that were loaded and not computed. No time is told while no
/// engine has measured its speed.
pub fn saved(tokens: u64, prefill_us: u64) -> String {
    let told = match prefill_us {
        0 => String::new(),
        us if us < 600_000_000 => format!(", at least {:.1} s of prefill", us as f64 / 1e6),
        us => format!(", at least {} min of prefill", us / 60_000_000),
    };
    counted(tokens, "token") + &told
}

/// A duration in its two largest units.
pub fn uptime(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// What others gave as a text, without what a terminal would take for a command; quotes stay as they are.
pub fn escaped(text: &str) -> String {
    text.split_inclusive(['\'', '"']).fold(String::new(), |told, part| {
        let quote = part.ends_with(['\'', '"']).then(|| &part[part.len() - 1..]);
        let plain = part.strip_suffix(quote.unwrap_or("")).unwrap_or(part);
        told + &plain.escape_debug().to_string() + quote.unwrap_or("")
    })
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Columns as wide as their widest cell.
pub struct Table {
    /// By column: to the right?
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A heading that begins with `>` has its column to the right, as numbers want.
    pub fn new(head: &[&str]) -> Table {
        let right = head.iter().map(|cell| cell.starts_with('>')).collect();
        Table { right, rows: vec![head.iter().map(|cell| cell.trim_start_matches('>').to_string()).collect()] }
    }

    pub fn row<const COLUMNS: usize>(&mut self, cells: [String; COLUMNS]) {
        assert_eq!(COLUMNS, self.right.len(), "every row has all columns");
        self.rows.push(cells.to_vec());
    }

    /// The lines, each begun with `indent` and ended without blanks.
    pub fn render(&self, indent: &str) -> String {
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.right.len()).map(width).collect();
        // Not by the width of a format, which is limited: an engine's name may be long.
        let pad = |column: usize, cell: &str| {
            let blanks = " ".repeat(widths[column] - cell.chars().count());
            if self.right[column] { blanks + cell } else { format!("{cell}{blanks}") }
        };
        let line = |row: &Vec<String>| {
            let cells: Vec<String> = row.iter().enumerate().map(|(column, cell)| pad(column, cell)).collect();
            format!("{}\n", format!("{indent}{}", cells.join("  ")).trim_end())
        };
        self.rows.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_told_as_many() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "block")), ["0 blocks", "1 block", "2 blocks"]);
        assert_eq!([0, 1, 2].map(was), ["were", "was", "were"]);
        assert_eq!(saved(1, 0), "1 token");
    }

    #[test]
    fn a_cell_may_have_any_length() {
        let mut table = Table::new(&["name", ">size"]);
        let long = "x".repeat(1 << 17);
        table.row([long.clone(), "1".to_string()]);
        assert_eq!(table.render("").lines().last(), Some(format!("{long}     1").as_str()));
    }

    #[test]
    fn numbers_stand_under_each_other_and_no_line_ends_in_blanks() {
        let mut table = Table::new(&["name", ">size", ">blocks", "note"]);
        table.row(["a", "4.0 KiB", "7", "x"].map(str::to_string));
        table.row(["longer", "16.0 MiB", "1234", ""].map(str::to_string));
        assert_eq!(
            table.render("  "),
            "  name        size  blocks  note\n  a        4.0 KiB       7  x\n  longer  16.0 MiB    1234\n"
        );
    }

    #[test]
    fn json_keeps_its_letters_and_none_of_them_commands_a_terminal() {
        let text = "é 模型 \"a\" \\ ' \u{1b}[2J\u{7f}\u{9b}31m\u{202e}\u{2066}\u{feff}\u{2028}\u{e0041}\n";
        let value = serde_json::json!({ "name": text });
        let told = json(&value);
        assert!(told.starts_with("{\n  \"name\": \"é 模型 "), "{told}");
        assert!(told.contains("\\u007f\\u009b31m\\u202e\\u2066\\ufeff\\u2028\\udb40\\udc41"), "{told}");
        assert!(!told.contains(|letter: char| letter.is_control() && letter != '\n'), "{told}");
        assert_eq!(serde_json::from_str::<Value>(&told).unwrap(), value);
    }

    #[test]
    fn a_text_keeps_its_quotes_and_commands_no_terminal() {
        assert_eq!(escaped("used memory > 'maxmemory', \"a\"\x1b[2J"), "used memory > 'maxmemory', \"a\"\\u{1b}[2J");
    }

    #[test]
    fn no_time_is_claimed_of_an_unknown_speed() {
        assert_eq!(saved(0, 0), "0 tokens");
        assert_eq!(saved(7, 0), "7 tokens");
        assert_eq!(saved(7, 90_000), "7 tokens, at least 0.1 s of prefill");
        assert_eq!(saved(7, 3_600_000_000), "7 tokens, at least 60 min of prefill");
    }

    #[test]
    fn a_time_is_told_in_its_two_largest_units() {
        let told = [(5, "5 s"), (119, "1 min 59 s"), (7265, "2 h 1 min"), (90_000, "1 d 1 h")];
        told.into_iter().for_each(|(seconds, text)| assert_eq!(uptime(seconds), text));
    }
}
