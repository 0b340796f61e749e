//! Runs the copy benchmark: `cargo bench -p forebay-bench --bench copy_speed -- [threads [level]]`.
//! Prints one row as JSON a line.

use forebay_device::Level;
use forebay_device::bench::{self, CopyBench};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = forebay_bench::arguments();
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
