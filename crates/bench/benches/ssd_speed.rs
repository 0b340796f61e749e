//! Runs the disk benchmark as `forebay bench ssd` does, and prints raw figures.
//!
//! `cargo bench -p forebay-bench --bench ssd_speed -- FILE,… recovery BLOCKS SEGMENT_MIB`, or
//! `… -- FILE SIZE,… DEPTH,… PAIRS RUN_MIB`. `… -- FILE fill BLOCKS SEGMENT_MIB NAMESPACE,…` leaves a disk for a
//! daemon: blocks of these namespaces in turn, by their ids.

use std::error::Error;
use std::path::{Path, PathBuf};

use forebay_core::NamespaceId;
use forebay_io::ssd::bench::{BenchConfig, Row, fill_file, recovery, run};
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
        [path, "fill", blocks, segment_mib, namespaces] => {
            let namespaces = namespaces.split(',').map(|id| u128::from_str_radix(id, 16).map(NamespaceId));
            let namespaces: Vec<NamespaceId> = namespaces.collect::<Result<_, _>>()?;
            fill_file(Path::new(path), blocks.parse()?, &namespaces, segment_mib.parse::<u64>()? << 20)?;
        }
        [path, sizes, depths, pairs, run_mib] => {
            let depths = numbers(depths)?.into_iter().map(u32::try_from).collect::<Result<_, _>>()?;
            let run_bytes = run_mib.parse::<u64>()? << 20;
            let shape = BenchConfig { engine, sizes_bytes: numbers(sizes)?, depths, ..BenchConfig::new(path.into()) };
            run(&BenchConfig { pairs: pairs.parse()?, run_bytes, capacity_bytes: 8 * run_bytes, ..shape }, print)?;
        }
        _ => return Err("the head of this benchmark says which arguments it takes".into()),
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
