//! What the tier asks of a store is understood by moto's server as well. It answers some hundred requests a second, too
//! few for the suite's tens of thousands.

use forebay_core::ErrorKind;
use forebay_core::tier::{OpKind, Outcome};
use forebay_io::object::ObjectConfig;

use crate::bed::*;
use crate::s3::{BUCKET, Moto};

#[test]
fn blocks_are_stored_found_loaded_and_removed() {
    let moto = Moto::start();
    let endpoint = moto.endpoint();
    let mut host = Host::open(&ObjectConfig { part_bytes: 5 << 20, ..config(&endpoint) });
    let blocks = [(0, 1), (1, 4096), (2, 100_003), (3, (12 << 20) + 1)];
    for (number, length_bytes) in blocks {
        assert_eq!(host.one(OpKind::Exists, number, 0), Outcome::Absent);
        assert_eq!(host.one(LOAD, number, length_bytes), Outcome::Absent);
        host.is_stored(number, length_bytes);
        host.is_stored(number, length_bytes);
        assert!(matches!(host.one(OpKind::Exists, number, 0), Outcome::Found));
        host.verify(number, length_bytes);
    }
    let counters = host.tier.report().counters;
    assert_eq!((counters.stored_blocks, counters.repeated_stores), (4, 4));
    assert_eq!(host.one(LOAD, 1, 4000), Outcome::Failed(ErrorKind::Invalid), "another length");
    drop(host);
    let mut host = Host::open(&config(&endpoint));
    for (number, length_bytes) in blocks {
        host.verify(number, length_bytes);
        assert_eq!(host.one(REMOVE, number, 0), Outcome::Removed);
        assert_eq!(host.one(REMOVE, number, 0), Outcome::Absent);
        assert_eq!(host.one(LOAD, number, length_bytes), Outcome::Absent);
    }
}

#[test]
fn what_another_program_wrote_under_a_blocks_name_is_never_data() {
    let moto = Moto::start();
    let endpoint = moto.endpoint();
    let mut host = Host::open(&config(&endpoint));
    let name = format!("{:032x}/0001-{:016x}", 9, 2);
    for body in [&b""[..], b"something else", &[0; 4096 + 96]] {
        let answer = moto.ask(&format!("PUT /{BUCKET}/team/cache/{name}"), body);
        assert!(answer.contains("200"), "{answer}");
        host.fill(2, 0x77);
        let outcome = host.one(LOAD, 2, 4096);
        assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
        assert!(host.is_filled(2, 0x77));
    }
    // The last one has the block's length, and was taken away when it was loaded.
    host.is_stored(2, 4096);
    host.verify(2, 4096);
}
