//! `forebay purge`: drops blocks at once, without asking.
//!
//! A short id stands for the one namespace whose id begins with it; the daemon gets whole ids. A dry run only asks what
//! the pool holds.
//!
//! The command waits for the daemon's own disks, and says on a terminal how far they are. When it is interrupted, the
//! daemon goes on with the disks.
//!
//! With `--shared-stores` the daemon empties these too. The command prints the result for each store, and fails unless
//! all of them are known to be empty.

use std::io::IsTerminal;

use forebay_core::namespace::Descriptor;
use forebay_core::{Error, ErrorKind, PAGE_BYTES};
use forebay_rpc::client::Client;
use forebay_rpc::proto::{InspectReply, NamespaceInfo, PurgeReply, PurgeRequest, PurgedPlace, TierPurge};
use serde_json::{Value, json};

use crate::arguments::{Purge, What};
use crate::client;
use crate::failure::Failure;
use crate::output::{counted, hex, note, print, print_json, size, was};
use crate::serve::runtime;

pub const ID_DIGITS: usize = 32;
/// Fewer digits could name a namespace by accident.
const MIN_DIGITS: usize = 4;

pub fn run(arguments: &Purge) -> Result<(), Failure> {
    let is_of_tenant = arguments.what.tenant.is_some();
    // A script is told of a purge without an answer, too.
    let tell = |failure: &Failure| match failure {
        Failure::Run(error) if arguments.json => print_json(&failed(error)),
        _ => {}
    };
    match ask(arguments).inspect_err(tell)? {
        Answer::Meant(request, known) => Ok(knew(foretell(&request, &known, arguments.json) > 0, is_of_tenant)?),
        Answer::Purged(reply, kept) => {
            let verdict = match arguments.shared_stores {
                true => judge(&reply, arguments.pause_seconds),
                false => knew(!reply.namespace_ids.is_empty(), is_of_tenant),
            };
            match arguments.json {
                true => print_json(&to_json(&reply, kept, verdict.as_ref().err())),
                false => print(&told(&reply, is_of_tenant, kept)),
            }
            Ok(verdict?)
        }
    }
}

enum Answer {
    /// A dry run: what is asked for, and the namespaces that the daemon knows.
    Meant(PurgeRequest, Vec<NamespaceInfo>),
    /// With what [`told`] has to know.
    Purged(PurgeReply, Option<bool>),
}

fn ask(arguments: &Purge) -> Result<Answer, Failure> {
    let sockets = arguments.daemon.socket_directory()?;
    let mut client = client::connect(&sockets);
    let runtime = runtime()?;
    let mut what = arguments.what.clone();
    if let Some(short) = what.namespace.as_deref().filter(|id| is_short(id)) {
        what.namespace = Some(whole(short, &runtime.block_on(client.inspect())?.namespaces)?);
    }
    let request = request(&what, arguments).map_err(Failure::Usage)?;
    if arguments.dry_run {
        return Ok(Answer::Meant(request, runtime.block_on(client.inspect())?.namespaces));
    }
    let mut is_quick = true;
    let ask = async |watching: &mut Client| match std::mem::take(&mut is_quick) || !std::io::stderr().is_terminal() {
        true => client::is_alive(watching).await,
        false => say_progress(watching).await,
    };
    let reply = runtime.block_on(client::attended(&sockets, client.purge(request), ask))?;
    // The purge is done: a daemon that does not say what it shares is no failure of it.
    let has_stores = |reply: InspectReply| reply.tiers.iter().any(|tier| !tier.stores.is_empty());
    let kept = match arguments.shared_stores {
        true => None,
        false => runtime.block_on(client.inspect()).ok().map(has_stores),
    };
    Ok(Answer::Purged(reply, kept))
}

/// Says how far the disks are.
async fn say_progress(client: &mut Client) -> Result<(), Error> {
    for tier in client.inspect().await?.tiers {
        tier.purge.iter().for_each(|purge| note(&progress(&tier.name, purge)));
    }
    Ok(())
}

/// One line for a tier.
pub fn progress(tier: &str, purge: &TierPurge) -> String {
    let TierPurge { namespaces, removed_blocks, walked_ratio } = purge;
    let what =
        format!("{tier}: {} removed, {} to go", counted(*removed_blocks, "block"), counted(*namespaces, "namespace"));
    match walked_ratio {
        Some(ratio) => format!("{what}; {:.0} % of its index looked through", ratio * 100.0),
        None => what,
    }
}

/// A tenant that nobody has is probably mistyped. An id names a namespace whether or not this daemon has seen it: a
/// purge by id is for those whose pool is lost, too.
fn knew(any: bool, is_of_tenant: bool) -> Result<(), Error> {
    if any || !is_of_tenant {
        return Ok(());
    }
    let error = Error::new(ErrorKind::NotFound, "this daemon knows no namespace of the tenant");
    Err(error.hint("`forebay inspect` lists the namespaces that it knows"))
}

/// Fails unless the daemon reports each of its shared stores as empty, and pauses as it was asked to.
fn judge(reply: &PurgeReply, pause_seconds: Option<u32>) -> Result<(), Error> {
    const EARLIER: &str = "the daemon is of an earlier version: restart it with the installed version";
    if !reply.reached_stores {
        let error = Error::new(ErrorKind::Unsupported, "the daemon purged its pool and disks, but no shared store");
        return Err(error.hint(EARLIER));
    }
    if pause_seconds.is_some_and(|seconds| seconds != reply.pause_seconds) {
        let error = Error::new(ErrorKind::Unsupported, "the daemon purged, but does not pause");
        return Err(error.hint(EARLIER));
    }
    let failed = reply.places.iter().filter(|place| !place.error.is_empty()).count();
    if failed > 0 {
        let error = Error::new(ErrorKind::Unavailable, "the purge is not complete").with("failed", failed);
        return Err(error.hint("follow the hints above, and purge again; what was removed stays removed"));
    }
    Ok(())
}

/// `kept` says whether there are shared stores that were not asked to be emptied, as far as that is known.
fn told(reply: &PurgeReply, is_of_tenant: bool, kept: Option<bool>) -> String {
    let (blocks, bytes) = (reply.purged_blocks, size(reply.purged_bytes));
    let mut text = format!("{}, {bytes}, {} removed from the pool\n", counted(blocks, "block"), was(blocks));
    if let Some(blocks) = reply.disk_blocks {
        text += &format!("{} {} removed from this host's disks\n", counted(blocks, "block"), was(blocks));
    }
    text += &match reply.held_blocks {
        0 => String::new(),
        1 => "1 more block is held by an engine: no lookup finds it, and it is freed when released\n".to_string(),
        held => {
            format!("{held} more blocks are held by engines: no lookup finds them, and they are freed when released\n")
        }
    };
    if reply.namespace_ids.is_empty() && !is_of_tenant && reply.places.iter().all(|place| place.error.is_empty()) {
        text += "this daemon has not seen this namespace; the pool and disks of this host have no block of it now\n";
    }
    if kept == Some(true) {
        text += "shared stores keep their blocks: `--shared-stores` removes them\n";
    }
    if !reply.reached_stores {
        return text;
    }
    reply.places.iter().for_each(|place| text += &place_told(place));
    if reply.places.is_empty() {
        text += "this daemon has no shared store\n";
    }
    if reply.pause_seconds > 0 {
        text +=
            &format!("for {} s this host reads none of this from a tier and writes none to one\n", reply.pause_seconds);
    }
    if is_of_tenant {
        text += "this daemon knows these namespaces of the tenant; purge others with `--namespace`:\n";
        reply.namespace_ids.iter().for_each(|id| text += &format!("  {}\n", hex(id)));
    }
    text
}

fn place_told(place: &PurgedPlace) -> String {
    let PurgedPlace { tier, place, blocks, values, error, hint } = place;
    let name = format!("{tier} {place}");
    let removed = format!("{}, {}, {} removed", counted(*blocks, "block"), counted(*values, "value"), was(*blocks));
    let removed = format!("{}: {removed}", name.trim_end());
    match error.is_empty() {
        true => format!("{removed}\n"),
        false => format!("{removed}, and then the purge failed: {error}\n  hint: {hint}\n"),
    }
}

/// `kept` as in [`told`].
fn to_json(reply: &PurgeReply, kept: Option<bool>, error: Option<&Error>) -> Value {
    let mut object = error.map_or_else(|| json!({"is_complete": true}), failed);
    object["purged_blocks"] = reply.purged_blocks.into();
    object["purged_bytes"] = reply.purged_bytes.into();
    object["held_blocks"] = reply.held_blocks.into();
    object["namespaces"] = reply.namespace_ids.iter().map(|id| hex(id)).collect();
    if let Some(blocks) = reply.disk_blocks {
        object["disk_blocks"] = blocks.into();
    }
    if let Some(kept) = kept {
        object["shared_stores_keep_blocks"] = kept.into();
    }
    if reply.pause_seconds > 0 {
        object["pause_seconds"] = reply.pause_seconds.into();
    }
    if reply.reached_stores {
        object["places"] = reply.places.iter().map(place_to_json).collect();
    }
    object
}

fn failed(error: &Error) -> Value {
    json!({"is_complete": false, "error": error.to_string(), "hint": error.hint_text().unwrap_or_default()})
}

fn place_to_json(place: &PurgedPlace) -> Value {
    json!({
        "tier": place.tier,
        "place": place.place,
        "removed_blocks": place.blocks,
        "removed_values": place.values,
        "is_complete": place.error.is_empty(),
        "error": place.error,
        "hint": place.hint,
    })
}

/// Prints what the request would remove from the pool, and gives the number of namespaces that it means.
fn foretell(request: &PurgeRequest, known: &[NamespaceInfo], json: bool) -> usize {
    let meant: Vec<&NamespaceInfo> = known.iter().filter(|namespace| is_meant(request, namespace)).collect();
    let groups = || meant.iter().flat_map(|namespace| &namespace.groups);
    let blocks: u64 = groups().map(|group| group.ready_blocks).sum();
    // As the purge counts them: slots are whole pages.
    let bytes: u64 = groups().map(|group| group.ready_blocks * group.block_bytes.next_multiple_of(PAGE_BYTES)).sum();
    let ids: Vec<String> = meant.iter().map(|namespace| hex(&namespace.namespace_id)).collect();
    if json {
        print_json(&json!({"is_dry_run": true, "blocks": blocks, "bytes": bytes, "namespaces": ids}));
        return meant.len();
    }
    let mut text = format!("a purge would remove {}, {}, from the pool\n", counted(blocks, "block"), size(bytes));
    ids.iter().for_each(|id| text += &format!("  {id}\n"));
    if ids.is_empty() && !request.namespace_id.is_empty() {
        text += "this daemon has not seen this namespace; a purge also removes what its disks have of it\n";
    }
    print(&text);
    meant.len()
}

fn is_meant(request: &PurgeRequest, namespace: &NamespaceInfo) -> bool {
    match request.namespace_id.is_empty() {
        true => namespace.fields.get(Descriptor::TENANT).map_or("", String::as_str) == request.tenant,
        false => namespace.namespace_id == request.namespace_id,
    }
}

fn is_short(id: &str) -> bool {
    (MIN_DIGITS..ID_DIGITS).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The one id that begins so.
fn whole(short: &str, known: &[NamespaceInfo]) -> Result<String, Error> {
    let begins = |id: &String| id.starts_with(&short.to_ascii_lowercase());
    let mut ids = known.iter().map(|namespace| hex(&namespace.namespace_id)).filter(begins);
    match (ids.next(), ids.next()) {
        (Some(id), None) => Ok(id),
        (Some(_), Some(_)) => Err(Error::invalid(format!("several namespace ids begin with `{short}`"))
            .hint("give more digits; `forebay inspect` lists the ids")),
        (None, _) => Err(Error::new(ErrorKind::NotFound, format!("no namespace id begins with `{short}`"))
            .hint("`forebay inspect` lists the ids")),
    }
}

fn request(meant: &What, arguments: &Purge) -> Result<PurgeRequest, Error> {
    let request = what(meant)?;
    let Purge { shared_stores, timeout_seconds, wait_seconds, pause_seconds, .. } = *arguments;
    Ok(PurgeRequest {
        shared_stores,
        timeout_seconds,
        wait_seconds,
        pause_seconds: pause_seconds.unwrap_or(0),
        ..request
    })
}

fn what(what: &What) -> Result<PurgeRequest, Error> {
    if let Some(namespace) = &what.namespace {
        return Ok(PurgeRequest { namespace_id: namespace_id(namespace)?, ..PurgeRequest::default() });
    }
    let tenant = what.tenant.clone().unwrap_or_default();
    Ok(PurgeRequest { all_tenants_named_empty: tenant.is_empty(), tenant, ..PurgeRequest::default() })
}

/// 32 hexadecimal digits, most significant first.
fn namespace_id(text: &str) -> Result<Vec<u8>, Error> {
    let is_hex = text.len() == ID_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match u128::from_str_radix(text, 16) {
        Ok(id) if is_hex => Ok(id.to_be_bytes().to_vec()),
        _ => Err(Error::invalid(format!("`{text}` is not a namespace id"))
            .hint("give at least four digits of an id that `forebay inspect` lists")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_taken_whole_or_not_at_all() {
        let id = namespace_id("00ff000000000000000000000000000a").unwrap();
        assert_eq!((id.len(), id[1], id[15]), (16, 0xff, 10));
        for bad in [
            "",
            "0a",
            "00ff000000000000000000000000000a0",
            "+0ff000000000000000000000000000a",
            "00ff00000000000000000000000000zz",
        ] {
            assert!(namespace_id(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn only_an_empty_tenant_that_was_asked_for_means_those_without_one() {
        let of = |tenant: &str| what(&What { namespace: None, tenant: Some(tenant.to_string()) }).unwrap();
        assert!(of("").all_tenants_named_empty);
        assert!(!of("a").all_tenants_named_empty);
    }
}
