//! The daemon's log: lines that wait in a bounded queue for a thread that writes them to standard error.
//!
//! Holds true: who logs never waits, whoever reads standard error, or does not. Lines for which there is no room are
//! lost, and counted; how many, is said in their place as soon as lines are written again.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_daemon::write_whole;
use serde_json::{Value, json};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// Bytes of lines that may wait: some hours of a healthy daemon's, and no more memory than anybody would miss.
const WAITING_BYTES: usize = 1 << 20;

/// See the module's head.
#[derive(Clone)]
pub struct Log(Arc<Shared>);

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Something was put into the queue.
    has_more: Condvar,
    /// All of it was written.
    is_written: Condvar,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Lost since the last line that found room.
    lost: u64,
    /// Lost because they could not be written, since the last line that came.
    unwritten: u64,
    is_writing: bool,
    is_json: bool,
}

impl Log {
    /// Starts the thread, which ends with the process. `is_json`: lines are objects, those of the log's own too.
    pub fn start(to: impl Write + AsFd + Send + 'static, is_json: bool) -> Log {
        let log = Log(Arc::default());
        log.0.lock().is_json = is_json;
        let shared = log.0.clone();
        let run = move || shared.write_all(to);
        std::thread::Builder::new().name("log".into()).spawn(run).expect("the system starts a thread");
        log
    }

    /// A line that no filter may take, in a log of objects.
    pub fn tell(&self, level: &str, target: &str, fields: &Value) {
        self.put(&object(level, target, fields));
    }

    fn put(&self, line: &[u8]) {
        self.0.lock().put(line);
        self.0.has_more.notify_one();
    }

    /// Waits until all lines are written, but no longer than `limit`.
    pub fn flush(&self, limit: Duration) {
        let is_busy = |queue: &mut Queue| queue.is_writing || queue.lost > 0 || !queue.lines.is_empty();
        let _ = self.0.is_written.wait_timeout_while(self.0.lock(), limit, is_busy);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_all(&self, mut to: impl Write + AsFd) {
        let mut queue = self.lock();
        loop {
            match queue.take() {
                Some(line) => {
                    drop(queue);
                    let written = write_whole(&mut to, &line);
                    queue = self.lock();
                    // A full disk behind the log, or a reader that is gone, ends no daemon. The loss is said when there
                    // is something else to say: this loop does not spin on it.
                    queue.unwritten += u64::from(written.is_err());
                }
                None => {
                    queue.is_writing = false;
                    self.is_written.notify_all();
                    queue = self.has_more.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

impl Queue {
    fn put(&mut self, line: &[u8]) {
        if self.bytes + line.len() > WAITING_BYTES {
            self.lost += 1;
            return;
        }
        self.lost += std::mem::take(&mut self.unwritten);
        let told = self.told();
        self.bytes += line.len() + told.as_ref().map_or(0, Vec::len);
        self.lines.extend(told);
        self.lines.push_back(line.to_vec());
    }

    fn take(&mut self) -> Option<Vec<u8>> {
        let line = self.lines.pop_front();
        self.bytes -= line.as_ref().map_or(0, Vec::len);
        let line = line.or_else(|| self.told());
        self.is_writing = line.is_some();
        line
    }

    /// The line that stands for those that were lost.
    fn told(&mut self) -> Option<Vec<u8>> {
        let lost = std::mem::take(&mut self.lost);
        (lost > 0).then(|| {
            let message = "nobody read the log in time; lines of it are lost";
            match self.is_json {
                true => object("WARN", "forebay::log", &json!({"message": message, "lines": lost})),
                false => format!("{}  WARN forebay::log: {message} lines={lost}\n", time()).into_bytes(),
            }
        })
    }
}

/// An event's line as the log's other objects are.
fn object(level: &str, target: &str, fields: &Value) -> Vec<u8> {
    let event = json!({"timestamp": time(), "level": level, "fields": fields, "target": target});
    format!("{event}\n").into_bytes()
}

fn time() -> String {
    let mut time = String::new();
    // Without the time, if there is none.
    let _ = SystemTime.format_time(&mut Writer::new(&mut time));
    time
}

/// One event's line.
impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.put(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Log;

    fn make_writer(&self) -> Log {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn who_logs_never_waits_and_what_was_lost_is_said_in_its_place() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut log = Log::start(writer, false);
        let line = |number: u32| format!("{number} {}\n", "x".repeat(100));
        // More than the pipe and the queue hold; nobody reads.
        let lines = 20_000;
        (0..lines).for_each(|number| log.write_all(line(number).as_bytes()).unwrap());
        let mut text = String::new();
        let reading = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while !text.ends_with("the end\n") {
                let length = reader.read(&mut bytes).unwrap();
                text.push_str(std::str::from_utf8(&bytes[..length]).unwrap());
            }
            text
        });
        Log::flush(&log, Duration::from_secs(20));
        log.write_all(b"the end\n").unwrap();
        let text = reading.join().unwrap();
        // The writer may have made room now and then, so lines may be lost at several places.
        let (mut next, mut lost) = (0, 0);
        for said in text.lines() {
            if let Some((_, count)) = said.split_once("lines=") {
                lost += count.parse::<u32>().unwrap();
                next += count.parse::<u32>().unwrap();
            } else if next < lines {
                assert_eq!(said, line(next).trim_end());
                next += 1;
            } else {
                assert_eq!(said, "the end");
            }
        }
        assert!(lost > 0 && next == lines, "{next} of {lines} lines are kept or told, {lost} told");
    }

    #[test]
    fn a_pipe_that_does_not_block_loses_no_line() {
        let (mut reader, writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        let mut log = Log::start(writer, false);
        // More than the pipe holds, less than the queue.
        let lines: Vec<String> = (0..2000).map(|number| format!("{number} {}\n", "x".repeat(100))).collect();
        lines.iter().for_each(|line| log.write_all(line.as_bytes()).unwrap());
        Log::flush(&log, Duration::from_millis(100));
        let mut text = vec![0; lines.iter().map(String::len).sum()];
        reader.read_exact(&mut text).unwrap();
        assert!(text == lines.concat().as_bytes());
    }

    #[test]
    fn what_is_said_of_lost_lines_is_an_object_among_objects() {
        let mut queue = Queue { lost: 3, is_json: true, ..Queue::default() };
        let line: serde_json::Value = serde_json::from_slice(&queue.told().unwrap()).unwrap();
        assert_eq!((&line["level"], &line["fields"]["lines"]), (&"WARN".into(), &3.into()), "{line}");
    }

    #[test]
    fn lines_that_could_not_be_written_are_counted() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut log = Log::start(writer, false);
        for line in ["one\n", "two\n"] {
            log.write_all(line.as_bytes()).unwrap();
            Log::flush(&log, Duration::from_secs(20));
        }
        // The second, and the line that told of the first.
        assert_eq!(log.0.lock().unwritten, 2);
    }

    #[test]
    fn a_flush_waits_for_all_lines_and_for_no_reader_that_does_not_read() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut log = Log::start(writer, false);
        log.write_all(b"one\n").unwrap();
        log.write_all(b"two\n").unwrap();
        Log::flush(&log, Duration::from_secs(20));
        let mut bytes = [0; 8];
        reader.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"one\ntwo\n");
        (0..100).for_each(|_| log.write_all(&[b'x'; 4096]).unwrap());
        Log::flush(&log, Duration::from_millis(10));
    }
}
