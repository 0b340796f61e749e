//! The benchmark measures something, finds no errors and leaves nothing behind. How fast is a report's business.

use std::sync::atomic::Ordering;

use forebay_core::ErrorKind;
use forebay_io::ssd::bench::{BenchConfig, Direction, Errors, recovery, run};
use forebay_io::uring::EngineChoice;

use crate::bed::{KIB, MIB};
use crate::files::home;

#[test]
fn a_benchmark_gives_a_row_for_each_shape_and_removes_its_file() {
    let home = home();
    let mut engines = Vec::new();
    for (engine, may_use_fio) in [(EngineChoice::Auto, true), (EngineChoice::Threads, false)] {
        let config = BenchConfig {
            capacity_bytes: 24 * MIB,
            engine,
            sizes_bytes: vec![4 * KIB, 100_000 / 4096 * 4096],
            depths: vec![3],
            pairs: 2,
            run_bytes: 4 * MIB,
            may_use_fio,
            ..BenchConfig::new(home.path().join("disk"))
        };
        let mut told = 0;
        let rows = run(&config, |_| told += 1).unwrap();
        assert_eq!((rows.len(), told), (4, 4));
        for row in &rows {
            assert_eq!(row.errors.count, 0, "{row:?}");
            assert!(row.pairs.len() == 2 && row.gb_per_s() > 0.0 && row.baseline_gb_per_s() > 0.0, "{row:?}");
            assert!(row.p50_us > 0 && row.p50_us <= row.p99_us && row.ratio().is_finite(), "{row:?}");
            assert!(may_use_fio || row.baseline == "pread/pwrite");
        }
        let directions: Vec<Direction> = rows.iter().map(|row| row.direction).collect();
        assert_eq!(directions, [Direction::Write, Direction::Read, Direction::Write, Direction::Read]);
        engines.push(rows[0].engine);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "no file is left");
    }
    assert_eq!(engines[1], "threads");
}

/// The slots that no load filled have what the stores left there, perhaps of a block that is long evicted.
#[test]
fn a_run_of_fewer_blocks_than_the_depth_has_no_errors() {
    let home = home();
    let config = BenchConfig {
        capacity_bytes: 24 * MIB,
        sizes_bytes: vec![256 * KIB],
        depths: vec![8],
        pairs: 3,
        run_bytes: MIB,
        may_use_fio: false,
        ..BenchConfig::new(home.path().join("disk"))
    };
    let rows = run(&config, |_| {}).unwrap();
    assert!(rows.len() == 2 && rows.iter().all(|row| row.errors == Errors::default()), "{rows:?}");
}

#[test]
fn a_benchmark_that_is_stopped_ends_and_removes_its_file() {
    let home = home();
    let config = BenchConfig {
        capacity_bytes: 24 * MIB,
        depths: vec![3],
        pairs: 2,
        run_bytes: 4 * MIB,
        may_use_fio: false,
        ..BenchConfig::new(home.path().join("disk"))
    };
    let mut told = 0;
    let stopped = run(&config, |_| {
        told += 1;
        config.stop.store(true, Ordering::Relaxed);
    });
    assert_eq!((stopped.expect_err("it ends early").kind(), told), (ErrorKind::Unavailable, 1));
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "no file is left");
}

#[test]
fn a_benchmark_touches_no_file_that_exists() {
    let home = home();
    let path = home.path().join("precious");
    std::fs::write(&path, b"precious").unwrap();
    let error = run(&BenchConfig::new(path.clone()), |_| {}).expect_err("it is refused");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_recovery_benchmark_finds_all_blocks_again() {
    let home = home();
    let disks = ["one", "other"].map(|name| home.path().join(name));
    let row = recovery(&disks, 3000, 1 << 20, EngineChoice::Auto).unwrap();
    assert_eq!((row.stored_blocks, row.disks.len()), (6000, 2));
    for disk in &row.disks {
        assert_eq!((disk.recovery.blocks, disk.recovery.blocks_not_whole), (3000, 0));
        assert!(disk.recovery.segments_with_footer > 3, "they have footers");
        assert!(disk.took <= row.took);
    }
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "no file is left");
}

#[test]
fn a_recovery_benchmark_leaves_a_file_that_was_there() {
    let home = home();
    let [new, old] = ["new", "old"].map(|name| home.path().join(name));
    std::fs::write(&old, b"precious").unwrap();
    let error = recovery(&[new.clone(), old.clone()], 10, 1 << 20, EngineChoice::Auto).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert_eq!(std::fs::read(&old).unwrap(), b"precious");
    assert!(!new.exists());
}
