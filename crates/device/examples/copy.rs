//! Runs the copy benchmark: `cargo run --release -p forebay-device --example copy [threads [level]]`.
//! Prints one row as JSON a line.

use forebay_device::Level;
use forebay_device::bench::{self, CopyBench};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut bench = CopyBench::default();
    if let Some(threads) = arguments.next() {
        bench.threads = threads.parse()?;
    }
    if let Some(name) = arguments.next() {
        let level = Level::available().into_iter().find(|level| level.to_string() == name);
        bench.level = level.ok_or("this machine does not have that level")?;
    }
    bench::run(&bench, |row| println!("{}", serde_json::to_string(row).expect("a row is plain data")))?;
    Ok(())
}
