//! Emptying a bucket of namespaces, on moto's server, which lists and removes as Amazon's does.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use forebay_core::tier::{OpKind, Operation, Outcome};
use forebay_core::{BlockKey, Error, ErrorKind, NamespaceId};
use forebay_io::object::ObjectConfig;
use forebay_io::purge::Purging;

use crate::bed::*;
use crate::s3::{BUCKET, Moto};
use crate::server::{Fault, Server};

/// That of the bed's own blocks, and another one.
const OWN: NamespaceId = NamespaceId(9);
const OTHER: NamespaceId = NamespaceId(0x90);

fn empty(host: &Host, namespaces: &[NamespaceId]) -> (Result<(), Error>, u64) {
    let namespaces = namespaces.iter().copied().collect::<BTreeSet<_>>();
    let purging = Purging::new(namespaces, Instant::now() + DEADLINE);
    let outcome = (host.tier.places().remove(0).empty)(&purging);
    (outcome, purging.blocks())
}

fn emptied(host: &Host, namespaces: &[NamespaceId]) -> u64 {
    let (outcome, blocks) = empty(host, namespaces);
    outcome.unwrap_or_else(|error| panic!("{error}"));
    blocks
}

#[test]
fn one_namespace_goes_and_nothing_else() {
    let moto = Moto::start();
    for prefix in ["team/cache", ""] {
        let config = ObjectConfig { prefix: prefix.to_owned(), ..config(&moto.endpoint()) };
        let mut host = Host::open(&config);
        (0..80).for_each(|number| host.is_stored(number, 100));
        let op = host.op(OpKind::Store, 1, 100);
        let checksum = forebay_core::checksum::checksum(&block_bytes(1, 100));
        host.pool.write(SLOT_BYTES, &block_bytes(1, 100));
        let other = Operation { key: BlockKey { namespace: OTHER, ..op.key }, checksum, ..op };
        assert!(matches!(host.run(&[other])[0], Outcome::Stored));
        let folder = if prefix.is_empty() { OWN.to_string() } else { format!("{prefix}/{OWN}") };
        for name in ["0001-00", "0001-0000000000000001.old", "1-0000000000000001", "notes/0001-01"] {
            let answer = moto.ask(&format!("PUT /{BUCKET}/{folder}/{name}"), b"somebody's");
            assert!(answer.contains("200"), "{answer}");
        }
        // The first of these is a name of ours.
        assert_eq!(emptied(&host, &[OWN]), 81);
        let list = moto.ask(&format!("GET /{BUCKET}?list-type=2&prefix={folder}/"), b"");
        assert_eq!(list.matches("<Key>").count(), 3, "{list}");
        assert_eq!(emptied(&host, &[OWN, OTHER]), 1);
        assert_eq!(emptied(&host, &[OWN, OTHER]), 0);
        // The tier's own connections had no part in it.
        (0..3).for_each(|number| host.is_stored(number, 100));
        (0..3).for_each(|number| host.verify(number, 100));
    }
}

/// What a store answers that has too many requests.
#[test]
fn requests_that_a_busy_store_refuses_are_repeated() {
    let server = Server::start();
    let mut host = Host::open(&config(&server.endpoint));
    for (method, status) in [("GET", 429), ("GET", 503), ("DELETE", 429), ("DELETE", 500)] {
        (0..20).for_each(|number| host.is_stored(number, 100));
        server.fail(method, Fault::Status(status), 3);
        assert_eq!(emptied(&host, &[OWN]), 20, "{method} {status}");
        assert_eq!(server.count(), 0, "{method} {status}");
    }
}

#[test]
fn a_store_that_refuses_stands_still_or_is_only_read_from_is_an_error() {
    let server = Server::start();
    let patient = config(&server.endpoint);
    let host = Host::open(&ObjectConfig { timeout: Duration::from_millis(500), ..patient.clone() });
    for fault in [Fault::Status(403), Fault::Status(500), Fault::Hang] {
        server.fail("GET", fault, u32::MAX);
        let begun = Instant::now();
        let error = empty(&host, &[OWN]).0.unwrap_err();
        assert!(error.kind() == ErrorKind::Unavailable && error.hint_text().is_some(), "{fault:?}: {error}");
        assert!(begun.elapsed() < Duration::from_secs(10), "{fault:?}");
        server.fail("GET", fault, 0);
    }
    let reader = Host::open(&ObjectConfig { read_only: true, ..patient });
    assert_eq!(empty(&reader, &[OWN]).0.unwrap_err().kind(), ErrorKind::Unsupported);
}
