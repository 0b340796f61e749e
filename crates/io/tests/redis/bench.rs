//! The bench measures what it says, and leaves nothing behind.

use std::sync::atomic::Ordering;

use forebay_core::ErrorKind;
use forebay_io::redis::RedisConfig;
use forebay_io::redis::bench::{BenchConfig, Direction, run};

use crate::bed::config;
use crate::servers::{BOTH, Server};

#[test]
fn it_moves_blocks_both_ways_without_errors_and_removes_them() {
    for kind in BOTH {
        let server = Server::on_port(kind, &[]);
        for url in [server.url(), server.tcp_url()] {
            let small = BenchConfig {
                sizes_bytes: vec![5000, 1 << 20],
                runs: 2,
                run_bytes: 8 << 20,
                working_set_bytes: 4 << 20,
                lookup_keys: 100,
                ..BenchConfig::new(RedisConfig { value_bytes: 300_000, ..config(&url) })
            };
            let mut told = 0;
            let report = run(&small, |_| told += 1).unwrap();
            let shapes: Vec<_> = report.rows.iter().map(|row| (row.size_bytes, row.direction)).collect();
            let sizes = small.sizes_bytes.iter();
            let expected: Vec<_> = sizes.flat_map(|size| [(*size, Direction::Set), (*size, Direction::Get)]).collect();
            assert_eq!((shapes, told), (expected, 4));
            for row in &report.rows {
                assert_eq!((row.errors, row.samples.len()), (0, 2), "{row:?}");
                assert!(row.samples.iter().all(|sample| sample.server_cpu_s_per_gb.is_some_and(|cpu| cpu > 0.0)));
            }
            let lookups = report.lookups.unwrap();
            assert_eq!((lookups.keys, lookups.errors), (100, 0));
            assert_eq!(server.admin().must(&["DBSIZE"]), "0", "something was left on {kind:?}");
        }
    }
}

#[test]
fn what_it_wrote_is_removed_also_if_it_is_stopped() {
    let server = Server::on_port(BOTH[0], &[]);
    let small = BenchConfig {
        sizes_bytes: vec![5000],
        run_bytes: 1 << 20,
        working_set_bytes: 1 << 20,
        ..BenchConfig::new(config(&server.tcp_url()))
    };
    let stopped = run(&small, |_| small.stop.store(true, Ordering::Relaxed));
    assert_eq!(stopped.expect_err("it ends early").kind(), ErrorKind::Unavailable);
    assert_eq!(server.admin().must(&["DBSIZE"]), "0", "something was left");
}
