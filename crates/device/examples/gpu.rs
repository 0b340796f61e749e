//! The rows of `bench/gpu.sh`, one a call: `gpu ROW [ARGUMENTS]`. Prints one figure as JSON a line.
//!
//! peaks · register WHAT BYTES [FILE] · checksums · schedules · kills FILE COUNT · kill-me FILE; a last
//! argument `small` cuts a row to what the fake driver bears.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_device::Memory;
use forebay_device::cuda::bench::{self, Extent, Figure, Layout};
use forebay_device::cuda::{Driver, LibCuda};
use rustix::fs::{FlockOperation, flock};

const ORDINAL: u32 = 0;
/// How long pages are watched after a kill.
const WATCH: Duration = Duration::from_millis(500);

fn main() -> Result<(), Box<dyn Error>> {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let is_small = words.last().is_some_and(|word| word == "small");
    words.truncate(words.len() - usize::from(is_small));
    let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let extent = if is_small { Extent::small(seed) } else { Extent::whole(seed) };
    let driver = || -> Result<Arc<dyn Driver>, Box<dyn Error>> { Ok(Arc::new(LibCuda::load()?)) };
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["peaks"] => bench::peaks(driver()?, ORDINAL, &extent)?.into_iter().for_each(tell),
        ["checksums"] => bench::checksums(&driver()?, ORDINAL, &extent)?.into_iter().for_each(tell),
        ["schedules"] => {
            for layout in [Layout::Layers, Layout::Blocks] {
                let bytes = bench::schedules(&driver()?, ORDINAL, layout, &extent)?;
                let what = format!("{} schedules over {layout:?}, seed {seed}: bytes checked", extent.schedules);
                tell(Figure { what, value: bytes as f64, unit: "B" });
            }
        }
        ["register", what, bytes] => {
            let memory = bench::populated(bytes.parse()?, seed)?;
            bench::registration(driver()?, ORDINAL, what, memory)?.into_iter().for_each(tell);
        }
        ["register", what, bytes, file] => {
            let memory = Memory::shared(&open(file)?, bytes.parse()?)?;
            bench::registration(driver()?, ORDINAL, what, memory)?.into_iter().for_each(tell);
        }
        ["kills", file, count] => kills(file, count.parse()?, is_small)?,
        ["kill-me", file] => {
            let file = open(file)?;
            flock(&file, FlockOperation::LockExclusive)?;
            bench::store_for_ever(driver()?, ORDINAL, &file, || println!("stores"))?;
        }
        _ => return Err("no such row: see the head of the source".into()),
    }
    Ok(())
}

fn tell(figure: Figure) {
    println!("{}", serde_json::to_string(&figure).expect("a figure is plain data"));
}

fn open(path: &str) -> Result<File, std::io::Error> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

/// Kills a process in the middle of stores, and watches the pages from the moment at which its lock is gone.
fn kills(path: &str, count: u64, is_small: bool) -> Result<(), Box<dyn Error>> {
    let bytes: u64 = if is_small { 1 << 20 } else { 256 << 20 };
    fs::write(path, vec![1u8; bytes as usize])?;
    let file = open(path)?;
    let (mut late, mut longest) = (0, Duration::ZERO);
    for at in 0..count {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.args(["kill-me", path]).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("it is piped")).read_line(&mut line)?;
        if line != "stores\n" {
            return Err(format!("the process to kill ended with {}", child.wait()?).into());
        }
        thread::sleep(Duration::from_millis(5 + 7 * at % 40));
        let killed = Instant::now();
        child.kill()?;
        // Waits in the kernel until the dead one's descriptors and mappings are closed.
        flock(&file, FlockOperation::LockExclusive)?;
        longest = longest.max(killed.elapsed());
        late += u64::from(bench::changes_within(&file, bytes, if is_small { WATCH / 10 } else { WATCH })?);
        flock(&file, FlockOperation::Unlock)?;
        child.wait()?;
    }
    tell(Figure {
        what: format!("{count} kills: those after which a byte changed"),
        value: late as f64,
        unit: "kills",
    });
    let what = "longest time from a kill to the end of its lock".to_string();
    tell(Figure { what, value: longest.as_secs_f64() * 1e3, unit: "ms" });
    fs::remove_file(path)?;
    Ok(())
}
