//! `forebay audit`: every block of the pool against its checksum and its record. Fails if any is not what was stored.

use forebay_core::{Error, ErrorKind};
use forebay_rpc::proto::AuditReply;
use serde_json::json;

use crate::arguments::Audit;
use crate::client;
use crate::failure::Failure;
use crate::output::{counted, print, print_json, size, was};
use crate::serve::runtime;

pub fn run(arguments: &Audit) -> Result<(), Failure> {
    let sockets = arguments.daemon.socket_directory()?;
    let mut client = client::connect(&sockets);
    let reply = runtime()?.block_on(client::attended(&sockets, client.audit(), client::is_alive))?;
    let AuditReply { blocks, bytes, corrupt, misnamed, complaint } = reply;
    if arguments.json {
        let facts = [("blocks", blocks), ("bytes", bytes), ("corrupt", corrupt), ("misnamed", misnamed)];
        let mut object: serde_json::Map<_, _> =
            facts.map(|(name, value)| (name.to_string(), json!(value))).into_iter().collect();
        object.insert("complaint".to_string(), json!(complaint));
        print_json(&object.into());
    } else {
        print(&format!(
            "{}, {}, {} read: {corrupt} had wrong bytes, {misnamed} had a record that names another block\n",
            counted(blocks, "block"),
            size(bytes),
            was(blocks)
        ));
    }
    if !complaint.is_empty() {
        return Err(Error::new(ErrorKind::Corrupt, format!("the index is inconsistent: {complaint}"))
            .hint("report this bug of the daemon, and restart the daemon, which rebuilds the index")
            .into());
    }
    if corrupt + misnamed > 0 {
        return Err(Error::new(
            ErrorKind::Corrupt,
            "blocks of the pool had wrong bytes or a wrong record; they were dropped",
        )
        .hint("run a memory test: the memory is faulty, or a process that maps the pool wrote to the wrong place")
        .into());
    }
    Ok(())
}
