//! The disk's own speed: fio where it is installed, otherwise plain system calls on as many threads.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, PAGE_BYTES, Result};
use rustix::time::ClockId;
use serde_json::Value;

use super::config::{BenchConfig, Direction};
use super::sample::{Sample, cpu_time};
use crate::uring::{Memory, Region, Span};

/// See the module documentation.
pub(super) struct Baseline {
    path: PathBuf,
    /// Reads use the first this many bytes of the file, writes the same number after them.
    part_bytes: u64,
    size_bytes: u64,
    depth: u32,
    has_fio: bool,
    stop: Arc<AtomicBool>,
}

impl Baseline {
    pub(super) fn find(config: &BenchConfig, size_bytes: u64, depth: u32) -> Baseline {
        let fio = || Command::new("fio").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        let has_fio = config.may_use_fio && fio().is_ok_and(|status| status.success());
        let (path, part_bytes) = (config.path.clone(), config.capacity_bytes);
        Baseline { path, part_bytes, size_bytes, depth, has_fio, stop: config.stop.clone() }
    }

    pub fn name(&self) -> &'static str {
        if self.has_fio { "fio" } else { "pread/pwrite" }
    }

    /// Writes the part that later writes use, so that no measured write is the first to its place.
    pub fn prepare(&self) -> Result<()> {
        self.sample(Direction::Write, self.part_bytes, u64::MAX).map(drop)
    }

    pub fn sample(&self, direction: Direction, bytes: u64, writes_per_flush: u64) -> Result<Sample> {
        let writes_per_flush = writes_per_flush.min(bytes / self.size_bytes).max(1);
        if self.has_fio {
            self.fio(direction, bytes, writes_per_flush)
        } else {
            self.plain(direction, bytes, writes_per_flush)
        }
    }

    fn fio(&self, direction: Direction, bytes: u64, writes_per_flush: u64) -> Result<Sample> {
        let Baseline { path, part_bytes, size_bytes, depth, .. } = self;
        let (pattern, offset, section) = match direction {
            Direction::Read => ("randread", 0, "read"),
            Direction::Write => ("write", *part_bytes, "write"),
        };
        let mut command = Command::new("fio");
        command.args(["--name=baseline", "--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1"]);
        command.args(["--norandommap", "--randrepeat=0", "--allow_file_create=0", "--output-format=json"]);
        command.arg(format!("--filename={}", path.display())).arg(format!("--rw={pattern}"));
        command.arg(format!("--bs={size_bytes}")).arg(format!("--iodepth={depth}")).arg(format!("--offset={offset}"));
        command.arg(format!("--size={}", part_bytes - part_bytes % size_bytes)).arg(format!("--io_size={bytes}"));
        match direction {
            Direction::Read => command.arg("--readonly").arg(format!("--blockalign={PAGE_BYTES}")),
            Direction::Write => command.arg(format!("--fdatasync={writes_per_flush}")),
        };
        let failed =
            |why: String| Error::new(ErrorKind::Unsupported, "fio cannot do what the tier does here").with("why", why);
        let output = command.output().map_err(|error| failed(error.to_string()))?;
        let report: Value = serde_json::from_slice(&output.stdout)
            .map_err(|_| failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))?;
        let job = &report["jobs"][0];
        let of = |value: &Value| value.as_f64().filter(|value| *value > 0.0);
        let (Some(moved), Some(took_ms)) = (of(&job[section]["io_bytes"]), of(&job[section]["runtime"])) else {
            return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        };
        let busy = (of(&job["usr_cpu"]).unwrap_or(0.0) + of(&job["sys_cpu"]).unwrap_or(0.0)) / 100.0;
        let (took, elapsed_ms) = (Duration::from_secs_f64(took_ms / 1e3), of(&job["job_runtime"]).unwrap_or(took_ms));
        Ok(Sample::new(moved as u64, took, Duration::from_secs_f64(elapsed_ms / 1e3 * busy)))
    }

    fn plain(&self, direction: Direction, bytes: u64, writes_per_flush: u64) -> Result<Sample> {
        let cannot = |error| Error::new(ErrorKind::Io, "cannot run the plain loop").source(error);
        let mut options = File::options();
        let file = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(&self.path).map_err(cannot)?;
        let memory = Region::anonymous((self.size_bytes * u64::from(self.depth)) as usize).map_err(cannot)?;
        memory.want_huge_pages();
        let memory = Memory::new(memory.clone(), memory);
        let (next, count) = (AtomicU64::new(0), bytes / self.size_bytes);
        let (begun, cpu_begun) = (Instant::now(), cpu_time(ClockId::ProcessCPUTime));
        let work = |thread: u32| {
            let span = Span::pool(u64::from(thread) * self.size_bytes, self.size_bytes as u32);
            loop {
                let nth = next.fetch_add(1, Ordering::Relaxed);
                if nth >= count || self.stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                if direction == Direction::Write && nth.is_multiple_of(writes_per_flush) {
                    rustix::fs::fdatasync(&file)?;
                }
                self.move_one(&file, &memory, direction, span, nth)?;
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.depth).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
        })
        .map_err(cannot)?;
        Ok(Sample::new(count * self.size_bytes, begun.elapsed(), cpu_time(ClockId::ProcessCPUTime) - cpu_begun))
    }

    fn move_one(
        &self,
        file: &File,
        memory: &Memory,
        direction: Direction,
        span: Span,
        nth: u64,
    ) -> std::io::Result<()> {
        let places = self.part_bytes / self.size_bytes;
        let moved = match direction {
            Direction::Read => {
                let place = nth.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
                memory.pread(file, span, place % places * self.size_bytes)
            }
            Direction::Write => memory.pwrite(file, &[span], self.part_bytes + nth % places * self.size_bytes),
        };
        if moved? == span.len { Ok(()) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
    }
}
