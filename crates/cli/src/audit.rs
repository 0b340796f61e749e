//! `forebay audit`: every ready block against its checksum and its record. Fails if any is not what was stored.

use forebay_core::{Error, ErrorKind};
use forebay_rpc::proto::AuditReply;
use serde_json::json;

use crate::arguments::Audit;
use crate::client;
use crate::failure::Failure;
use crate::output::{print, print_json, size};
use crate::serve::runtime;

pub fn run(arguments: &Audit) -> Result<(), Failure> {
    let mut client = client::connect(&arguments.daemon.socket_directory()?);
    let AuditReply { blocks, bytes, corrupt, misnamed, complaint } = runtime()?.block_on(client.audit())?;
    if arguments.json {
        let facts = [("blocks", blocks), ("bytes", bytes), ("corrupt", corrupt), ("misnamed", misnamed)];
        let mut object: serde_json::Map<_, _> =
            facts.map(|(name, value)| (name.to_string(), json!(value))).into_iter().collect();
        object.insert("complaint".to_string(), json!(complaint));
        print_json(&object.into());
    } else {
        print(&format!("{blocks} blocks, {}: {corrupt} corrupt, {misnamed} misnamed\n", size(bytes)));
    }
    if !complaint.is_empty() {
        return Err(Error::new(ErrorKind::Corrupt, format!("the index does not agree with itself: {complaint}"))
            .hint("this is a bug of the daemon: report it, and restart the daemon, which rebuilds the index")
            .into());
    }
    if corrupt + misnamed > 0 {
        return Err(Error::new(ErrorKind::Corrupt, "blocks of the pool are not what was stored; they were dropped")
            .hint("a process that maps the pool wrote where it should not, or the memory is bad: run a memory test")
            .into());
    }
    Ok(())
}
