//! The terminal while the screen has it: raw, on a page of its own, without cursor.
//!
//! Invariants: it is as it was when this is dropped, also if the command panics, and while the command is stopped. A
//! terminal that belongs to the shell meanwhile is left alone.

use std::io::{Write, stdin, stdout};
use std::panic;

use forebay_core::{Error, ErrorKind, Result};
use rustix::process::{Signal, getpgrp, getpid, kill_process};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr};

use super::text::Line;

/// Another page, no cursor, no wrapping of lines that a terminal takes for longer than they are.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// Ends a drawing.
const HOME: &str = "\x1b[H";
/// Where the terminal does not say its size.
const USUAL: (usize, usize) = (80, 24);
/// A screen below which nothing can be told.
const LEAST: (usize, usize) = (40, 8);

pub struct Terminal {
    before: Termios,
    is_coloured: bool,
}

impl Terminal {
    pub fn open(is_coloured: bool) -> Result<Terminal> {
        let wrong = |error| Error::new(ErrorKind::Io, "cannot take the terminal").source(std::io::Error::from(error));
        let before = tcgetattr(stdin()).map_err(wrong)?;
        let terminal = Terminal { before: before.clone(), is_coloured };
        terminal.take().map_err(wrong)?;
        let (hook, left) = (panic::take_hook(), before.clone());
        // Before the message, which would be lost with the page.
        panic::set_hook(Box::new(move |about| {
            restore(&left);
            hook(about);
        }));
        Ok(terminal)
    }

    fn take(&self) -> rustix::io::Result<()> {
        if !is_ours() {
            return Ok(());
        }
        let mut raw = self.before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Flush, &raw)?;
        write(ENTER);
        Ok(())
    }

    /// Leaves it and stops the command, as the signal would. Returns when the command is continued.
    pub fn stop(&self) {
        restore(&self.before);
        // The signal that nobody can hear: the other one is what brought us here.
        let _ = kill_process(getpid(), Signal::STOP);
        self.take_again();
    }

    /// After the command was stopped: others may have used the terminal meanwhile.
    pub fn take_again(&self) {
        let _ = self.take();
    }

    /// Columns and rows.
    pub fn size(&self) -> (usize, usize) {
        let size = tcgetwinsize(stdout()).ok().map(|size| (size.ws_col as usize, size.ws_row as usize));
        let (columns, rows) = size.filter(|(columns, rows)| *columns > 0 && *rows > 0).unwrap_or(USUAL);
        (columns.max(LEAST.0), rows.max(LEAST.1))
    }

    pub fn show(&self, lines: &[Line]) {
        if !is_ours() {
            return;
        }
        let mut text = String::new();
        for (at, line) in lines.iter().enumerate() {
            let line = if self.is_coloured { line.to_codes() } else { line.to_text() };
            // Cleared first: behind a full line the cursor stands on its last letter.
            text += &format!("\x1b[{};1H\x1b[K{line}", at + 1);
        }
        write(&(text + HOME));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore(&self.before);
    }
}

fn restore(before: &Termios) {
    if is_ours() {
        write(LEAVE);
        let _ = tcsetattr(stdin(), OptionalActions::Flush, before);
    }
}

/// Not while the command is in the background. A terminal that controls nobody is ours alone.
fn is_ours() -> bool {
    tcgetpgrp(stdin()).map_or(true, |foreground| foreground == getpgrp())
}

/// A terminal that is gone ends the command by its hang-up.
fn write(text: &str) {
    let mut out = stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
