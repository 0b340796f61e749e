//! The screen that stays: one frame after another, and keys.
//!
//! Three sources send to one channel: a thread that reads keys, and a thread that asks the daemon and hears signals.
//! Invariant: no source waits for another, so keys work while the daemon does not answer.

use std::io::{Read, stdin, stdout};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::client::Client;
use forebay_rpc::proto::{FrameReply, FrameRequest};
use rustix::process::Signal as Number;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::draw::draw;
use super::look::{Key, Look, Wish};
use super::terminal::Terminal;
use super::text::clock;
use super::{PERIOD, ask};
use crate::ending;
use crate::failure::Failure;
use crate::output::is_coloured;
use crate::serve::runtime;

/// Far more than anybody types between two drawings.
const MAX_EVENTS: usize = 256;

enum Event {
    Answer(Box<Result<FrameReply>>),
    Key(Key),
    Resized,
    Stop,
    Continued,
    End,
}

/// Until a key or a signal ends it.
pub fn run(mut client: Client) -> Result<(), Failure> {
    let runtime = runtime()?;
    // A daemon that is not there from the start is rather a wrong place to look for it.
    let mut frame = runtime.block_on(ask(&mut client, FrameRequest::default()))?;
    // Before the terminal is taken: a signal that nobody hears would leave it taken.
    let signals = runtime.block_on(async { signals() })?;
    let is_paused = Arc::new(AtomicBool::new(false));
    let (events, heard) = sync_channel(MAX_EVENTS);
    let terminal = Terminal::open(is_coloured(&stdout()))?;
    spawn("keys", {
        let events = events.clone();
        move || read_keys(&events)
    })?;
    spawn("frames", {
        let (is_paused, request) = (is_paused.clone(), frame.next_request());
        move || runtime.block_on(listen(client, request, signals, events, is_paused))
    })?;
    let mut look = Look::default();
    let mut gone: Option<(Instant, String)> = None;
    loop {
        look.gone = gone.as_ref().map(|(since, why)| {
            let (seconds, at) = (since.elapsed().as_secs(), clock(&frame));
            format!("no answer for {seconds} s, figures of {at}, trying again: {why}")
        });
        let (width, height) = terminal.size();
        terminal.show(&draw(&frame, &look, width, height));
        match next(&heard) {
            Some(Event::Answer(answer)) => match *answer {
                Ok(answer) => {
                    gone = None;
                    frame = answer.continuing(frame);
                }
                Err(error) => gone = Some((gone.map_or_else(Instant::now, |(since, _)| since), error.to_string())),
            },
            Some(Event::Key(key)) => match look.press(key) {
                Wish::Nothing => is_paused.store(look.is_paused, Relaxed),
                Wish::Quit => return Ok(()),
                Wish::Write => look.said = Some(written(&frame)),
            },
            Some(Event::Resized) | None => {}
            Some(Event::Stop) => terminal.stop(),
            Some(Event::Continued) => terminal.take_again(),
            Some(Event::End) => return Ok(()),
        }
    }
}

/// `None` after a second without any, so that the screen shows how time passes.
fn next(heard: &Receiver<Event>) -> Option<Event> {
    heard.recv_timeout(Duration::from_secs(1)).ok()
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(run);
    spawned.map(|_| ()).map_err(|error| Error::new(ErrorKind::Io, "cannot start a thread").source(error))
}

fn read_keys(events: &SyncSender<Event>) {
    let mut sent = [0; 64];
    loop {
        match stdin().lock().read(&mut sent) {
            // Nobody is there any more.
            Ok(0) | Err(_) => {
                let _ = events.send(Event::End);
                return;
            }
            Ok(count) => {
                for key in Key::all(&sent[..count]) {
                    if events.send(Event::Key(key)).is_err() {
                        return;
                    }
                }
            }
        }
    }
}

/// A signal, and what it means.
type Heard = (Signal, fn() -> Event);

/// What each signal means. All that end a program are here, because they would leave the terminal as it is.
fn signals() -> Result<Vec<Heard>> {
    let meanings: [(SignalKind, fn() -> Event); 3] = [
        (SignalKind::window_change(), || Event::Resized),
        (SignalKind::from_raw(Number::TSTP.as_raw()), || Event::Stop),
        (SignalKind::from_raw(Number::CONT.as_raw()), || Event::Continued),
    ];
    let heard = |(kind, event)| Ok((signal(kind)?, event));
    let heard: std::io::Result<Vec<Heard>> = meanings.into_iter().map(heard).collect();
    let mut heard = heard.map_err(|error| Error::new(ErrorKind::Io, "cannot listen for signals").source(error))?;
    heard.extend(ending::signals()?.into_iter().map(|signal| (signal, (|| Event::End) as fn() -> Event)));
    Ok(heard)
}

async fn listen(
    client: Client,
    request: FrameRequest,
    signals: Vec<Heard>,
    events: SyncSender<Event>,
    is_paused: Arc<AtomicBool>,
) {
    for (signal, event) in signals {
        tokio::spawn(hear(signal, events.clone(), event));
    }
    watch(client, request, &events, &is_paused).await;
}

async fn watch(mut client: Client, mut request: FrameRequest, events: &SyncSender<Event>, is_paused: &AtomicBool) {
    loop {
        tokio::time::sleep(PERIOD).await;
        if !is_paused.load(Relaxed) {
            let answer = ask(&mut client, request.clone()).await;
            if let Ok(frame) = &answer {
                request = frame.next_request();
            }
            if events.send(Event::Answer(Box::new(answer))).is_err() {
                return;
            }
        }
    }
}

async fn hear(mut signals: Signal, events: SyncSender<Event>, event: fn() -> Event) {
    while signals.recv().await.is_some() {
        if events.send(event()).is_err() {
            return;
        }
    }
}

/// Writes the frame to a file in the working directory, and says so.
fn written(frame: &FrameReply) -> String {
    let path = PathBuf::from(format!("forebay-frame-{}.json", frame.at_ms));
    match std::fs::write(&path, super::to_json(frame)) {
        Ok(()) => format!("wrote {}", path.display()),
        Err(error) => format!("cannot write {}: {error}", path.display()),
    }
}
