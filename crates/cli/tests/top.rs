//! `forebay top` as people and pipes have it: the real command on a terminal of ours, beside a real daemon.

mod command;
mod support;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use command::{Answer, hearing, run};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use support::*;

/// A page of its own.
const ENTERED: &str = "\x1b[?1049h";
const LEFT: &str = "\x1b[?1049l";
const DAEMON: [&str; 4] = ["--pool.capacity_bytes", "16MiB", "--http.address", "127.0.0.1:0"];

fn top(place: &Place, more: &[&str]) -> Answer {
    let sockets = place.sockets();
    run(&[&["top", "--socket.directory", sockets.to_str().unwrap()], more].concat())
}

/// The command on a terminal, and what stands there.
struct Screen {
    child: Child,
    /// Our end of the terminal, and its own.
    ours: File,
    its: OwnedFd,
    sent: Arc<Mutex<String>>,
    directory: tempfile::TempDir,
}

impl Screen {
    fn start(place: &Place, (columns, rows): (u16, u16), environment: &[(&str, &str)]) -> Screen {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&ours).expect("it may be opened");
        unlockpt(&ours).expect("it may be opened");
        let name = ptsname(&ours, Vec::new()).expect("it has a name");
        let its = open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("it opens");
        let end = || Stdio::from(its.try_clone().expect("another descriptor"));
        let directory = tempfile::tempdir().expect("a directory");
        resize(&its, (columns, rows));
        let child = hearing(&["top"])
            .args(["--socket.directory", place.sockets().to_str().unwrap()])
            .env_remove("NO_COLOR")
            .env("TERM", "xterm")
            .envs(environment.iter().copied())
            .current_dir(directory.path())
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .expect("the command starts");
        let screen = Screen { child, ours: File::from(ours), its, sent: Arc::default(), directory };
        let (mut reader, sent) = (screen.ours.try_clone().expect("another descriptor"), screen.sent.clone());
        thread::spawn(move || {
            let (mut piece, mut left) = ([0; 4096], Vec::new());
            while let Ok(count) = reader.read(&mut piece) {
                if count == 0 {
                    return;
                }
                left.extend_from_slice(&piece[..count]);
                // A letter may come in two pieces.
                let whole = std::str::from_utf8(&left).map_or_else(|error| error.valid_up_to(), str::len);
                let text: Vec<u8> = left.drain(..whole).collect();
                sent.lock().unwrap().push_str(&String::from_utf8(text).expect("it is valid so far"));
            }
        });
        screen
    }

    /// What was sent so far.
    fn sent(&self) -> String {
        self.sent.lock().unwrap().clone()
    }

    /// The lines of the newest drawing that is whole.
    fn lines(&self) -> Vec<String> {
        let sent = self.sent();
        let Some(whole) = sent.rfind("\x1b[H").map(|end| &sent[..end]) else { return Vec::new() };
        let begin = whole.rfind("\x1b[1;1H").unwrap_or(0);
        let mut lines = BTreeMap::new();
        let mut parts = whole[begin..].split(";1H\x1b[K");
        let mut place = parts.next().unwrap_or_default();
        for part in parts {
            let number: usize = place.rsplit("\x1b[").next().unwrap_or_default().parse().expect("a line's number");
            let end = part.rfind("\x1b[").filter(|end| part[end + 2..].bytes().all(|byte| byte.is_ascii_digit()));
            lines.insert(number, without_colours(&part[..end.unwrap_or(part.len())]));
            place = part;
        }
        lines.into_values().collect()
    }

    fn shows(&self, text: &str) -> bool {
        self.lines().iter().any(|line| line.contains(text))
    }

    /// Waits until a drawing has it.
    fn wait_for(&self, text: &str) {
        wait_until(&format!("the screen shows `{text}`"), || self.shows(text));
    }

    fn press(&mut self, keys: &str) {
        self.ours.write_all(keys.as_bytes()).expect("keys can be sent");
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn send(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it runs");
    }

    /// True once for each stop.
    fn is_stopped(&self) -> bool {
        let options = WaitOptions::UNTRACED | WaitOptions::NOHANG;
        let change = waitpid(Some(self.pid()), options).expect("it is our child");
        change.is_some_and(|(_, status)| status.stopped())
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.its).expect("it is a terminal").local_modes.contains(LocalModes::ICANON)
    }

    /// Waits for the command's end. The terminal is as it was.
    fn ended(mut self) -> Option<i32> {
        let status = self.child.wait().expect("it ends");
        assert!(!self.is_raw(), "the terminal is not as it was");
        wait_until("the page is left", || self.sent().contains(LEFT));
        status.code()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn resize(terminal: &OwnedFd, (columns, rows): (u16, u16)) {
    let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).expect("it has a size");
}

fn without_colours(text: &str) -> String {
    let mut parts = text.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |plain, part| plain + part.split_once('m').map_or(part, |(_, text)| text))
}

#[test]
fn keys_change_the_view_and_the_terminal_is_given_back() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &DAEMON);
    let (client, _worker) = engine(&place, "engine-a", 4096);
    client.namespace("blue", vec![group()]).expect("a namespace");
    let mut screen = Screen::start(&place, (80, 24), &[]);
    screen.wait_for("OK  the daemon is ready");
    screen.wait_for("engine-a");
    assert_eq!(screen.lines().len(), 24);
    assert!(screen.is_raw() && screen.sent().contains("\x1b[32mOK"));
    for (keys, text) in [
        ("m", "was evicted from the"),
        ("c", "too little traffic"),
        ("e", "sorted by keys a second"),
        ("s", "sorted by hit rate"),
        ("t", "holds 0 B of 16.0 MiB"),
        ("?", "WORDS"),
        ("1", "HIT RATE"),
        ("\t", "IN THE POOL"),
        ("\t\t/zz", "/zz_"),
        ("\r", "no name has `zz`"),
        ("\x1b", "engine-a"),
        ("p", "PAUSED"),
        ("w", "wrote forebay-frame-"),
    ] {
        screen.press(keys);
        screen.wait_for(text);
    }
    let file = std::fs::read_dir(screen.directory.path()).unwrap().next().expect("a file").unwrap();
    let frame: serde_json::Value = serde_json::from_slice(&std::fs::read(file.path()).unwrap()).expect("JSON");
    assert_eq!(frame["engines"][0]["engine_id"], "engine-a");
    resize(&screen.its, (120, 40));
    wait_until("it has the new size", || screen.lines().len() == 40);
    screen.wait_for("HISTORY");
    screen.press("q");
    assert_eq!(screen.ended(), Some(0));
}

/// Keys send none of these while the terminal is raw; other processes do.
#[test]
fn each_signal_that_ends_or_stops_a_program_leaves_the_terminal_as_it_was() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &DAEMON);
    let named = [Signal::QUIT, Signal::TERM, Signal::HUP, Signal::INT];
    let rare = [Signal::USR1, Signal::USR2, Signal::ALARM, Signal::PROF, Signal::IO, Signal::XCPU];
    for signal in named.into_iter().chain(rare) {
        let screen = Screen::start(&place, (80, 24), &[]);
        wait_until("the terminal is taken", || screen.is_raw());
        screen.send(signal);
        assert_eq!(screen.ended(), Some(0), "{signal:?}");
    }
    let mut screen = Screen::start(&place, (80, 24), &[]);
    for _ in 0..2 {
        screen.wait_for("OK  the daemon is ready");
        let pages = |code: &str| screen.sent().matches(code).count();
        let (entered, left) = (pages(ENTERED), pages(LEFT));
        screen.send(Signal::TSTP);
        wait_until("it stops", || screen.is_stopped());
        assert!(!screen.is_raw(), "the terminal is not as it was");
        wait_until("the page is left", || pages(LEFT) > left);
        screen.send(Signal::CONT);
        wait_until("the terminal is taken again", || screen.is_raw() && pages(ENTERED) > entered);
    }
    screen.press("m");
    screen.wait_for("was evicted from the");
    screen.press("q");
    assert_eq!(screen.ended(), Some(0));
}

#[test]
fn names_cannot_command_the_terminal_and_stay_what_they_are() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &DAEMON);
    let id = "a\u{202e}b\u{9b}31m\u{7f}";
    let (_client, _worker) = engine(&place, id, 4096);
    let (json, text) = (top(&place, &["--json"]), top(&place, &["--once"]));
    assert_eq!(json.json()["engines"][0]["engine_id"], id);
    for out in [&json.out, &text.out] {
        assert!(out.contains("202e"), "{out}");
        assert!(!out.contains(['\u{202e}', '\u{9b}', '\u{7f}']), "{out}");
    }
}

#[test]
fn a_daemon_that_is_killed_is_said_to_be_gone_and_shown_again_when_it_is_back() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &DAEMON);
    let screen = Screen::start(&place, (80, 24), &[("NO_COLOR", "1")]);
    screen.wait_for("OK  the daemon is ready");
    daemon.kill();
    screen.wait_for("NO DAEMON  ");
    let _daemon = Daemon::start(&place, &DAEMON);
    screen.wait_for("OK  the daemon is ready");
    assert!(!screen.sent().contains("\x1b[32m"), "no colour where none is wanted");
    assert!(screen.lines()[0].ends_with(|end: char| end.is_ascii_digit()), "the last column is there");
    screen.send(Signal::TERM);
    assert_eq!(screen.ended(), Some(0));
}

#[test]
fn text_json_and_lines_need_no_terminal_and_the_screen_does() {
    let place = Place::new();
    let absent = top(&place, &["--once"]);
    assert!(absent.code == 1 && absent.err.contains("hint:"), "{absent:?}");
    let _daemon = Daemon::start(&place, &DAEMON);
    let text = top(&place, &["--once"]);
    assert!(text.code == 0 && text.out.starts_with("forebay top  ") && text.out.contains("HISTORY"), "{text:?}");
    assert!(!text.out.contains('\x1b'), "{text:?}");
    assert_eq!(top(&place, &["--json"]).json()["pool"]["capacity_bytes"], 16 << 20);
    let screen = top(&place, &[]);
    assert!(screen.code == 2 && screen.err.contains("`--once`"), "{screen:?}");
    assert_eq!(top(&place, &["--once", "--json"]).code, 2);
}

#[test]
fn lines_come_one_a_second_until_nobody_reads_and_say_when_the_daemon_is_gone() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &DAEMON);
    let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["top", "--lines", "--socket.directory", place.sockets().to_str().unwrap()])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines().map(|line| line.expect("text"));
    assert!(lines.next().unwrap().starts_with("TIME "));
    assert_eq!(lines.next().unwrap().split_whitespace().nth(1), Some("0"), "keys a second");
    daemon.kill();
    assert!(lines.any(|line| line.starts_with("no daemon: ")));
    drop(lines);
    assert!(child.wait().expect("it ends").success(), "nobody reads any more");
}
