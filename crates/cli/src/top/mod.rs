//! `forebay top`: what an operator asks, on one screen. `text` and `chart` (lines) → `draw` and `who` (the screen out
//! of a frame) → `look` (keys) → `terminal`, `screen` (the screen that stays).

mod chart;
mod draw;
mod look;
mod screen;
mod terminal;
#[cfg(test)]
mod tests;
mod text;
mod who;

use std::io::{stdin, stdout};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::client::Client;
use forebay_rpc::proto::{FrameReply, FrameRequest};

use crate::arguments::Top;
use crate::client::connect_within;
use crate::failure::Failure;
use crate::output::{has_control_codes, is_coloured, json, print, print_next};
use crate::serve::runtime;
use draw::draw;
use look::Look;
use text::{Column, clock, count, heads, percent, row, speed, time};

/// Between two frames; the daemon makes no more of them.
const PERIOD: Duration = Duration::from_secs(1);
/// Of each question. A daemon that answers later is in trouble, which is to be told.
const DEADLINE: Duration = Duration::from_secs(3);
/// Of the text of one frame.
const WIDTH: usize = 110;
/// Lines of `--lines` below each heading.
const UNDER_ONE_HEAD: usize = 20;

pub fn run(arguments: &Top) -> Result<(), Failure> {
    let mut client = connect_within(&arguments.daemon.socket_directory()?, DEADLINE);
    if arguments.json {
        print(&to_json(&runtime()?.block_on(ask(&mut client, FrameRequest::default()))?));
    } else if arguments.once {
        print(&to_text(&runtime()?.block_on(ask(&mut client, FrameRequest::default()))?, is_coloured(&stdout())));
    } else if arguments.lines {
        return lines(&mut client);
    } else if has_control_codes(&stdout()) && has_control_codes(&stdin()) {
        return screen::run(client);
    } else {
        return Err(Failure::Usage(
            Error::invalid("the screen needs a terminal, for its keys and for what it draws")
                .hint("use `--once`, `--lines` or `--json` without a terminal"),
        ));
    }
    Ok(())
}

async fn ask(client: &mut Client, request: FrameRequest) -> Result<FrameReply> {
    client.frame(request).await.map_err(|error| match error.kind() {
        ErrorKind::Unsupported => Error::new(ErrorKind::Unsupported, "this daemon is of a release without frames")
            .source(error)
            .hint("use `forebay inspect` and `forebay advise`, or upgrade the daemon"),
        _ => error,
    })
}

/// One object, as `/frame.json` has it.
fn to_json(frame: &FrameReply) -> String {
    json(&serde_json::to_value(frame).expect("every message of a frame can be written"))
}

fn to_text(frame: &FrameReply, is_coloured: bool) -> String {
    let lines = draw(frame, &Look::default(), WIDTH, usize::MAX);
    lines.iter().map(|line| if is_coloured { line.to_codes() } else { line.to_text() } + "\n").collect()
}

const LINES: [Column; 11] = [
    Column { head: "TIME UTC", width: 8 },
    Column { head: ">KEYS/S", width: 7 },
    Column { head: ">HIT", width: 7 },
    Column { head: ">15 M", width: 7 },
    Column { head: ">P99", width: 8 },
    Column { head: ">HITS", width: 11 },
    Column { head: ">STORES", width: 11 },
    Column { head: ">EVICTS", width: 11 },
    Column { head: ">USED", width: 7 },
    Column { head: ">ENGINES", width: 7 },
    Column { head: "NOTE", width: 80 },
];

/// A line for each frame, until nobody reads any more. A daemon that does not answer has its line too.
fn lines(client: &mut Client) -> Result<(), Failure> {
    let runtime = runtime()?;
    let (mut told, mut request) = (0, FrameRequest::default());
    loop {
        let line = match runtime.block_on(ask(client, request.clone())) {
            Ok(frame) => {
                request = frame.next_request();
                one_line(&frame)
            }
            Err(error) if told == 0 => return Err(error.into()),
            Err(error) => format!("no daemon: {error}"),
        };
        let head = if told % UNDER_ONE_HEAD == 0 { heads(&LINES).to_text() + "\n" } else { String::new() };
        if !print_next(&format!("{head}{line}\n")) {
            return Ok(());
        }
        told += 1;
        std::thread::sleep(PERIOD);
    }
}

fn one_line(frame: &FrameReply) -> String {
    let (pool, lookups) = (frame.pool.unwrap_or_default(), frame.lookups.unwrap_or_default());
    let engines = frame.engines.iter().filter(|engine| engine.ranks > 0 && engine.state != "gone").count();
    let failed = frame.checks.iter().filter(|check| check.finding != "ok");
    let failed = failed.map(|check| format!("{}: {}", check.finding, check.name));
    let notes: Vec<String> = frame.alarms.iter().map(|alarm| alarm.name.clone()).chain(failed).collect();
    let cells = [
        clock(frame),
        count(lookups.keys_per_second),
        percent(lookups.hit_ratio),
        percent(frame.windows.first().and_then(|window| window.hit_ratio)),
        time(lookups.p99_seconds),
        speed(lookups.hit_bytes_per_second),
        speed(pool.stored_bytes_per_second),
        speed(pool.evicted_bytes_per_second),
        percent((pool.capacity_bytes > 0).then(|| pool.used_bytes as f64 / pool.capacity_bytes as f64)),
        engines.to_string(),
        notes.join("; "),
    ];
    row(&LINES, &cells).trim_end().to_owned()
}
