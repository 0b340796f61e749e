//! Runs the disk benchmark as `forebay bench ssd` does, and prints raw figures.
//!
//! `cargo bench -p forebay-bench --bench ssd_speed -- FILE,… recovery BLOCKS SEGMENT_MIB`, or
//! `… -- FILE SIZE,… DEPTH,… PAIRS RUN_MIB`.

use std::error::Error;
use std::path::PathBuf;

use forebay_io::ssd::bench::{BenchConfig, Row, recovery, run};
use forebay_io::uring::EngineChoice;

fn numbers(list: &str) -> Result<Vec<u64>, std::num::ParseIntError> {
    list.split(',').map(str::parse).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = forebay_bench::arguments().collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let engine = if std::env::var_os("FOREBAY_THREADS").is_some() { EngineChoice::Threads } else { EngineChoice::Auto };
    match arguments[..] {
        [paths, "recovery", blocks, segment_mib] => {
            let segment_bytes = segment_mib.parse::<u64>()? << 20;
            let paths: Vec<PathBuf> = paths.split(',').map(PathBuf::from).collect();
            println!("{:#?}", recovery(&paths, blocks.parse()?, segment_bytes, engine)?);
        }
        [path, sizes, depths, pairs, run_mib] => {
            let depths = numbers(depths)?.into_iter().map(u32::try_from).collect::<Result<_, _>>()?;
            let run_bytes = run_mib.parse::<u64>()? << 20;
            let shape = BenchConfig { engine, sizes_bytes: numbers(sizes)?, depths, ..BenchConfig::new(path.into()) };
            run(&BenchConfig { pairs: pairs.parse()?, run_bytes, capacity_bytes: 8 * run_bytes, ..shape }, print)?;
        }
        _ => return Err("FILE,… recovery BLOCKS SEGMENT_MIB, or FILE SIZE,… DEPTH,… PAIRS RUN_MIB".into()),
    }
    Ok(())
}

fn print(row: &Row) {
    println!(
        "{:?} {} KiB depth {} {}: {:.2} GB/s, {} {:.2} GB/s, ratio {:.3}; p50 {} us, p99 {} us; cpu {:.1} ms/GB, {} \
         {:.1}, checksum {:.1}; {} errors",
        row.direction,
        row.size_bytes >> 10,
        row.depth,
        row.engine,
        row.gb_per_s(),
        row.baseline,
        row.baseline_gb_per_s(),
        row.ratio(),
        row.p50_us,
        row.p99_us,
        row.cpu_ms_per_gb(),
        row.baseline,
        row.baseline_cpu_ms_per_gb(),
        row.checksum_ms_per_gb,
        row.errors.count
    );
    for (tier, baseline) in &row.pairs {
        println!("    {:.3} {:.3}", tier.gb_per_s, baseline.gb_per_s);
    }
}
