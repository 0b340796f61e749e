//! Random numbers, for seeds of hashes and for ids of starts.

use forebay_rpc::random_id;

pub fn number() -> u64 {
    let [first, ..] = *random_id().as_chunks().0 else { unreachable!("16 bytes hold two numbers") };
    u64::from_le_bytes(first)
}
