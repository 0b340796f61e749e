//! `forebay inspect`: what the daemon holds. Tables for people, the same facts as JSON for programs.

mod ssd;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use forebay_rpc::proto::{
    ClassInfo, DiskInfo, GroupInfo, InspectReply, NamespaceInfo, NodeBytes, PauseInfo, SessionInfo, StoreInfo,
    TierInfo, TierPurge, UserInfo,
};
use serde_json::{Value, json};

use crate::arguments::{Inspect, InspectWhat};
use crate::client;
use crate::failure::Failure;
use crate::output::{Table, escaped, has_control_codes, hex, print, print_json, print_next, saved, size, uptime};
use crate::purge::{self, ID_DIGITS};
use crate::serve::runtime;

pub fn run(arguments: &Inspect) -> Result<(), Failure> {
    if let Some(InspectWhat::Ssd(arguments)) = &arguments.what {
        return ssd::run(arguments);
    }
    let mut client = client::connect(&arguments.daemon.socket_directory()?);
    let runtime = runtime()?;
    let mut ask = || -> Result<InspectReply, Failure> {
        let mut reply = runtime.block_on(client.inspect())?;
        sort(&mut reply);
        Ok(reply)
    };
    match arguments.watch {
        Some(pause) => watch(&mut ask, pause, arguments.json),
        None if arguments.json => {
            print_json(&to_json(&ask()?));
            Ok(())
        }
        None => {
            print(&to_text(&ask()?));
            Ok(())
        }
    }
}

/// Prints until the daemon does not answer, nobody reads the output any more, or the user interrupts the command. On a
/// terminal each text replaces the previous one.
fn watch(
    ask: &mut impl FnMut() -> Result<InspectReply, Failure>,
    pause: Duration,
    is_json: bool,
) -> Result<(), Failure> {
    const CLEARED: &str = "\x1b[2J\x1b[H";
    let between = if has_control_codes(&std::io::stdout()) { CLEARED } else { "" };
    loop {
        let reply = ask()?;
        let text = match is_json {
            true => format!("{}\n", to_json(&reply)),
            false => format!("{between}{}\n", to_text(&reply)),
        };
        if !print_next(&text) {
            return Ok(());
        }
        std::thread::sleep(pause);
    }
}

/// Sorts the reply, so that equal contents give equal text whatever order the daemon keeps them in.
fn sort(reply: &mut InspectReply) {
    reply.namespaces.sort_by(|a, b| a.namespace_id.cmp(&b.namespace_id));
    reply.namespaces.iter_mut().for_each(|namespace| namespace.groups.sort_by_key(|group| group.group));
    reply.classes.sort_by_key(|class| class.slot_bytes);
    reply.sessions.sort_by(|a, b| (&a.engine_id, a.session).cmp(&(&b.engine_id, b.session)));
}

fn to_text(reply: &InspectReply) -> String {
    let mut text = format!("{}\n{}", summary(reply), pool(reply));
    let digits = shown_digits(&reply.namespaces);
    for namespace in &reply.namespaces {
        text += "\n";
        text += &namespace_text(namespace, digits);
    }
    if !reply.classes.is_empty() {
        text += &format!("\nslots\n{}", classes(&reply.classes));
    }
    for tier in &reply.tiers {
        text += &format!("\n{}", tier_text(tier));
    }
    if !reply.pauses.is_empty() {
        text += &format!("\npauses after purges\n{}", pauses(&reply.pauses));
    }
    if !reply.sessions.is_empty() {
        text += &format!("\nsessions\n{}", sessions(&reply.sessions));
    }
    if !reply.users.is_empty() {
        text += &format!("\nusers\n{}", users(&reply.users));
    }
    text
}

fn summary(reply: &InspectReply) -> String {
    // There is no memory behind the rest of the capacity, or not yet.
    let free_bytes = reply.populated_bytes.saturating_sub(reply.used_bytes);
    let hits = match reply.keys {
        0 => "no key was looked up yet".to_string(),
        keys => format!("{:.1} % of {keys} keys were hits", 100.0 * reply.hits as f64 / keys as f64),
    };
    let engines = reply.sessions.iter().filter(|session| session.ranks > 0 && session.is_connected).count();
    let connected = if engines == 1 { " is" } else { "s are" };
    let revision = match reply.revision.as_str() {
        "" => String::new(),
        revision => format!(" (revision {})", escaped(revision)),
    };
    format!(
        "forebay {}{revision} has run for {}: {} of {} are used, {} are free; {hits}; {engines} engine{connected} \
         connected\n",
        escaped(&reply.version),
        uptime(reply.uptime_seconds),
        size(reply.used_bytes),
        size(reply.capacity_bytes),
        size(free_bytes),
    )
}

/// How many digits distinguish each id from all others; commands accept the beginning of an id. JSON has whole ids.
fn shown_digits(namespaces: &[NamespaceInfo]) -> usize {
    const LEAST: usize = 8;
    let ids: Vec<String> = namespaces.iter().map(|namespace| hex(&namespace.namespace_id)).collect();
    let is_enough = |digits: &usize| {
        let short: BTreeSet<&str> = ids.iter().map(|id| &id[..id.len().min(*digits)]).collect();
        short.len() == ids.len()
    };
    (LEAST..ID_DIGITS).find(is_enough).unwrap_or(ID_DIGITS)
}

/// Explanations of the words beside the pool's figures.
const MEANINGS: [(&str, &str); 2] = [
    ("pinned", "cannot be evicted, because engines or transfers use it"),
    ("fenced", "kept out of use, because a process may still read or write it"),
];

fn pool(reply: &InspectReply) -> String {
    let mut table = Table::new(&["pool", &hex(&reply.pool_id)]);
    table.row(["boot".to_string(), format!("{:016x}", reply.boot_id)]);
    let sizes = [
        ("capacity", reply.capacity_bytes),
        ("populated", reply.populated_bytes),
        // While the pool is being populated, pages are there before the unit they belong to is.
        ("huge pages", reply.huge_bytes.min(reply.populated_bytes)),
        ("pinned", reply.pinned_bytes),
        ("fenced", reply.fenced_bytes),
    ];
    let shown = |name: &str, bytes| match MEANINGS.iter().find(|(of, _)| *of == name) {
        Some((_, meaning)) => format!("{}: {meaning}", size(bytes)),
        None => size(bytes),
    };
    sizes.into_iter().for_each(|(name, bytes)| table.row([name.to_string(), shown(name, bytes)]));
    if !reply.policy.is_empty() {
        table.row(["policy".to_string(), escaped(&reply.policy)]);
    }
    if !reply.nodes.is_empty() {
        table.row(["nodes".to_string(), nodes(&reply.nodes)]);
    }
    table.row(["saved".to_string(), saved(reply.saved_tokens, reply.saved_prefill_us)]);
    if !reply.pool_trouble.is_empty() {
        table.row(["trouble".to_string(), escaped(&reply.pool_trouble)]);
    }
    table.render("")
}

/// `2.0 GiB on NUMA node 0, 1.0 GiB on NUMA node 1`
pub fn nodes(nodes: &[NodeBytes]) -> String {
    let told = nodes.iter().map(|NodeBytes { node, bytes }| format!("{} on NUMA node {node}", size(*bytes)));
    told.collect::<Vec<_>>().join(", ")
}

fn namespace_text(namespace: &NamespaceInfo, digits: usize) -> String {
    let id = hex(&namespace.namespace_id);
    let mut text = format!("namespace {}\n", &id[..id.len().min(digits)]);
    let fields: BTreeMap<_, _> = namespace.fields.iter().collect();
    for (name, value) in fields {
        text += &format!("  {name}={}\n", escaped(value));
    }
    let mut table = Table::new(&[">group", ">block", ">ready", ">bytes"]);
    for GroupInfo { group, block_bytes, ready_blocks } in &namespace.groups {
        let bytes = size(block_bytes.saturating_mul(*ready_blocks));
        table.row([group.to_string(), size(*block_bytes), ready_blocks.to_string(), bytes]);
    }
    text + &table.render("  ")
}

fn classes(classes: &[ClassInfo]) -> String {
    let mut table = Table::new(&[">size", ">slots", ">ready", ">free", ">pinned", ">draining"]);
    for ClassInfo { slot_bytes, slots, ready, free, pinned, draining } in classes {
        let [slots, ready, free, pinned, draining] = [slots, ready, free, pinned, draining].map(u64::to_string);
        table.row([size(*slot_bytes), slots, ready, free, pinned, draining]);
    }
    table.render("  ")
}

fn tier_text(tier: &TierInfo) -> String {
    let colon = if tier.why.is_empty() { "" } else { ": " };
    let mut text = format!("tier {} {}{colon}{}\n", tier.name, standing(&tier.state), escaped(&tier.why));
    let mut table = Table::new(&[
        ">blocks",
        ">stored",
        ">promoted",
        ">hits",
        ">removed",
        ">touched",
        ">lost",
        ">loading",
        ">writing",
        ">waiting",
        ">late",
    ]);
    // Who else writes to a shared store is not known, so neither is what is in it.
    let blocks = if tier.stores.is_empty() { tier.blocks.to_string() } else { "-".to_string() };
    table.row([
        blocks,
        tier.stored_blocks.to_string(),
        tier.promoted_blocks.to_string(),
        tier.hits.to_string(),
        tier.evicted_blocks.to_string(),
        tier.touched_blocks.to_string(),
        tier.lost_blocks.to_string(),
        tier.loading_blocks.to_string(),
        tier.storing_blocks.to_string(),
        tier.waiting_blocks.to_string(),
        size(tier.late_bytes),
    ]);
    text += &table.render("  ");
    tier.purge.iter().for_each(|purge| text += &format!("  purge of {}\n", purge::progress(&tier.name, purge)));
    if !tier.disks.is_empty() {
        text += &disks_text(&tier.disks);
    }
    if !tier.stores.is_empty() {
        text += &stores_text(&tier.stores);
    }
    text
}

/// A state as a verb.
fn standing(state: &str) -> String {
    if state == "failed" { "has failed".to_string() } else { format!("is {state}") }
}

fn disks_text(disks: &[DiskInfo]) -> String {
    let mut table = Table::new(&[
        "disk",
        "engine",
        "i/o",
        ">capacity",
        ">live",
        ">blocks",
        ">written",
        ">lifetime",
        ">amplification",
    ]);
    for disk in disks {
        table.row([
            escaped(&disk.name),
            disk.engine.clone(),
            mode(disk).to_string(),
            size(disk.capacity_bytes),
            size(disk.live_bytes),
            disk.blocks.to_string(),
            size(disk.written_bytes),
            size(disk.lifetime_written_bytes),
            amplification(disk.written_bytes, disk.stored_bytes),
        ]);
    }
    let troubled = disks.iter().filter(|disk| !disk.trouble.is_empty());
    let told = troubled.map(|disk| {
        let (name, trouble) = (escaped(&disk.name), escaped(&disk.trouble));
        format!("  disk {name}: {trouble}\n{}", hint_text(&disk.hint))
    });
    table.render("  ") + &told.collect::<String>()
}

/// A missing disk has no figures to show.
fn mode(disk: &DiskInfo) -> &'static str {
    match (disk.segments, disk.is_direct) {
        (0, _) => "-",
        (_, true) => "direct",
        (_, false) => "buffered",
    }
}

fn usable(connections: u64) -> String {
    if connections == 1 { "1 connection is usable".into() } else { format!("{connections} connections are usable") }
}

fn hint_text(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!("    hint: {}\n", escaped(hint)) }
}

/// Events that never happened are left out.
fn stores_text(stores: &[StoreInfo]) -> String {
    let mut text = String::new();
    for store in stores {
        let state = if store.is_healthy { "is serving" } else { "is sick" };
        let mut facts = vec![state.to_string()];
        facts.extend(store.connections.map(usable));
        facts.extend(match (store.used_bytes, store.capacity_bytes) {
            (Some(used), Some(capacity)) => Some(format!("at most {} of {} are used", size(used), size(capacity))),
            (Some(used), None) => Some(format!("at most {} are used", size(used))),
            (None, Some(capacity)) => Some(format!("how much of {} is used is not known yet", size(capacity))),
            (None, None) => None,
        });
        facts.extend(store.is_sweeper.filter(|is| *is).map(|_| "this host makes room in it for all hosts".to_string()));
        text += &format!("  store {} {}\n", escaped(&store.name), facts.join("; "));
        if !store.trouble.is_empty() {
            let when = match store.trouble_age_seconds {
                Some(seconds) => format!("last problem, {seconds} s ago"),
                None => "problem".to_owned(),
            };
            text += &format!("    {when}: {}\n", escaped(&store.trouble));
        }
        if !store.refuses_reads.is_empty() {
            text += &format!("    it refuses reads: {}\n", escaped(&store.refuses_reads));
        }
        if !store.refuses_writes.is_empty() {
            text += &format!("    it refuses writes: {}\n", escaped(&store.refuses_writes));
        }
        text += &hint_text(&store.hint);
        let events: BTreeMap<_, _> = store.events.iter().filter(|(_, count)| **count > 0).collect();
        let events: Vec<String> = events.iter().map(|(event, count)| format!("{event} {count}")).collect();
        if !events.is_empty() {
            text += &format!("    {}\n", events.join(", "));
        }
    }
    text
}

/// Bytes written for each byte stored.
fn amplification(written_bytes: u64, stored_bytes: u64) -> String {
    if stored_bytes == 0 { "-".to_string() } else { format!("{:.2}", written_bytes as f64 / stored_bytes as f64) }
}

fn sessions(sessions: &[SessionInfo]) -> String {
    let mut table = Table::new(&[
        "engine",
        ">session",
        ">instance",
        "state",
        ">attached",
        ">leases",
        ">leased",
        ">reserved",
        ">registered",
        "saved",
    ]);
    for session in sessions {
        table.row([
            escaped(&session.engine_id),
            session.session.to_string(),
            session.instance.map_or("-".to_string(), |instance| instance.to_string()),
            if session.is_connected { "connected" } else { "gone" }.to_string(),
            format!("{}/{}", session.attached_ranks, session.ranks),
            session.leases.to_string(),
            session.leased_blocks.to_string(),
            session.reserved_blocks.to_string(),
            session.registered_bytes.map_or("-".to_string(), size),
            saved(session.saved_tokens, session.saved_prefill_us),
        ]);
    }
    table.render("  ")
}

fn pauses(pauses: &[PauseInfo]) -> String {
    let mut table = Table::new(&["off the tiers", ">seconds left"]);
    for PauseInfo { namespace_id, tenant, seconds } in pauses {
        let what = match namespace_id.is_empty() {
            true => format!("tenant={}", escaped(tenant)),
            false => format!("namespace {}", hex(namespace_id)),
        };
        table.row([what, seconds.map_or("-".to_string(), |seconds| seconds.to_string())]);
    }
    table.render("  ")
}

fn users(users: &[UserInfo]) -> String {
    let mut table = Table::new(&[
        "user",
        ">connections",
        ">sessions",
        ">calls",
        ">bytes in flight",
        ">bytes lent",
        "refused, by limit",
    ]);
    for user in users {
        let mut refused: Vec<String> = user.refused.iter().map(|(limit, count)| format!("{limit} {count}")).collect();
        refused.sort();
        table.row([
            user.uid.to_string(),
            user.connections.to_string(),
            user.sessions.to_string(),
            user.calls.to_string(),
            size(user.bytes),
            size(user.lent_bytes),
            if refused.is_empty() { "-".to_string() } else { escaped(&refused.join(", ")) },
        ]);
    }
    table.render("  ")
}

/// Names as in the protocol.
fn to_json(reply: &InspectReply) -> Value {
    json!({
        "version": reply.version,
        "revision": reply.revision,
        "policy": reply.policy,
        "uptime_seconds": reply.uptime_seconds,
        "keys": reply.keys,
        "hits": reply.hits,
        "used_bytes": reply.used_bytes,
        "boot_id": format!("{:016x}", reply.boot_id),
        "pool_id": hex(&reply.pool_id),
        "capacity_bytes": reply.capacity_bytes,
        "populated_bytes": reply.populated_bytes,
        "huge_bytes": reply.huge_bytes,
        "pinned_bytes": reply.pinned_bytes,
        "fenced_bytes": reply.fenced_bytes,
        "nodes": reply.nodes.iter().map(node_json).collect::<Vec<_>>(),
        "pool_trouble": reply.pool_trouble,
        "saved_tokens": reply.saved_tokens,
        "saved_prefill_us": reply.saved_prefill_us,
        "namespaces": reply.namespaces.iter().map(namespace_json).collect::<Vec<_>>(),
        "classes": reply.classes.iter().map(class_json).collect::<Vec<_>>(),
        "sessions": reply.sessions.iter().map(session_json).collect::<Vec<_>>(),
        "tiers": reply.tiers.iter().map(tier_json).collect::<Vec<_>>(),
        "pauses": reply.pauses.iter().map(pause_json).collect::<Vec<_>>(),
        "users": reply.users.iter().map(user_json).collect::<Vec<_>>(),
    })
}

fn pause_json(PauseInfo { namespace_id, tenant, seconds }: &PauseInfo) -> Value {
    match namespace_id.is_empty() {
        true => json!({ "tenant": tenant, "seconds": seconds }),
        false => json!({ "namespace_id": hex(namespace_id), "seconds": seconds }),
    }
}

fn node_json(NodeBytes { node, bytes }: &NodeBytes) -> Value {
    json!({ "node": node, "bytes": bytes })
}

fn namespace_json(namespace: &NamespaceInfo) -> Value {
    let group = |group: &GroupInfo| json!({"group": group.group, "block_bytes": group.block_bytes, "ready_blocks": group.ready_blocks});
    json!({
        "namespace_id": hex(&namespace.namespace_id),
        "fields": namespace.fields.iter().collect::<BTreeMap<_, _>>(),
        "groups": namespace.groups.iter().map(group).collect::<Vec<_>>(),
    })
}

fn class_json(class: &ClassInfo) -> Value {
    json!({
        "slot_bytes": class.slot_bytes,
        "slots": class.slots,
        "ready": class.ready,
        "free": class.free,
        "pinned": class.pinned,
        "draining": class.draining,
    })
}

fn purge_json(purge: TierPurge) -> Value {
    let TierPurge { namespaces, removed_blocks, walked_ratio } = purge;
    json!({ "namespaces": namespaces, "removed_blocks": removed_blocks, "walked_ratio": walked_ratio })
}

fn tier_json(tier: &TierInfo) -> Value {
    json!({
        "name": tier.name,
        "state": tier.state,
        "why": tier.why,
        "blocks": tier.blocks,
        "loading_blocks": tier.loading_blocks,
        "late_bytes": tier.late_bytes,
        "waiting_blocks": tier.waiting_blocks,
        "storing_blocks": tier.storing_blocks,
        "promoted_blocks": tier.promoted_blocks,
        "hits": tier.hits,
        "stored_blocks": tier.stored_blocks,
        "evicted_blocks": tier.evicted_blocks,
        "touched_blocks": tier.touched_blocks,
        "lost_blocks": tier.lost_blocks,
        "purge": tier.purge.map(purge_json),
        "disks": tier.disks.iter().map(disk_json).collect::<Vec<_>>(),
        "stores": tier.stores.iter().map(store_json).collect::<Vec<_>>(),
    })
}

fn store_json(store: &StoreInfo) -> Value {
    json!({
        "name": store.name,
        "is_healthy": store.is_healthy,
        "trouble": store.trouble,
        "trouble_age_seconds": store.trouble_age_seconds,
        "refuses_writes": store.refuses_writes,
        "refuses_reads": store.refuses_reads,
        "hint": store.hint,
        "connections": store.connections,
        "used_bytes": store.used_bytes,
        "capacity_bytes": store.capacity_bytes,
        "hanging_threads": store.hanging_threads,
        "is_sweeper": store.is_sweeper,
        "events": store.events.iter().collect::<BTreeMap<_, _>>(),
    })
}

fn disk_json(disk: &DiskInfo) -> Value {
    json!({
        "name": disk.name,
        "engine": disk.engine,
        "engine_why": disk.engine_why,
        "is_direct": disk.is_direct,
        "capacity_bytes": disk.capacity_bytes,
        "blocks": disk.blocks,
        "live_bytes": disk.live_bytes,
        "written_bytes": disk.written_bytes,
        "stored_bytes": disk.stored_bytes,
        "lifetime_written_bytes": disk.lifetime_written_bytes,
        "segments": disk.segments,
        "segment_bytes": disk.segment_bytes,
        "trouble": disk.trouble,
        "hint": disk.hint,
    })
}

fn session_json(session: &SessionInfo) -> Value {
    json!({
        "session": session.session,
        "engine_id": session.engine_id,
        "instance": session.instance,
        "is_connected": session.is_connected,
        "ranks": session.ranks,
        "attached_ranks": session.attached_ranks,
        "leases": session.leases,
        "leased_blocks": session.leased_blocks,
        "reserved_blocks": session.reserved_blocks,
        "saved_tokens": session.saved_tokens,
        "saved_prefill_us": session.saved_prefill_us,
        "registered_bytes": session.registered_bytes,
    })
}

fn user_json(user: &UserInfo) -> Value {
    json!({
        "uid": user.uid,
        "connections": user.connections,
        "sessions": user.sessions,
        "calls": user.calls,
        "bytes": user.bytes,
        "lent_bytes": user.lent_bytes,
        "refused": user.refused.iter().collect::<BTreeMap<_, _>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply() -> InspectReply {
        let namespace = |id: u8, fields: &[(&str, &str)], groups: &[(u32, u64, u64)]| NamespaceInfo {
            namespace_id: vec![id; 16],
            fields: fields.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect(),
            groups: groups
                .iter()
                .map(|(group, block_bytes, ready_blocks)| GroupInfo {
                    group: *group,
                    block_bytes: *block_bytes,
                    ready_blocks: *ready_blocks,
                })
                .collect(),
        };
        let session = |engine_id: &str, session: u64, is_connected: bool| SessionInfo {
            session,
            engine_id: engine_id.to_string(),
            instance: is_connected.then_some(3),
            ranks: 2,
            attached_ranks: 1,
            leases: 4,
            leased_blocks: 100,
            reserved_blocks: 64,
            is_connected,
            saved_tokens: if is_connected { 12_345 } else { 0 },
            saved_prefill_us: if is_connected { 6_700_000 } else { 0 },
            registered_bytes: is_connected.then_some(1 << 30),
        };
        let disk = DiskInfo {
            name: "/mnt/forebay".to_string(),
            engine: "io_uring".to_string(),
            engine_why: "this kernel allows io_uring".to_string(),
            is_direct: true,
            capacity_bytes: 64 << 30,
            blocks: 12_345,
            live_bytes: 12_345 * 196_608,
            written_bytes: 3 << 30,
            stored_bytes: 2 << 30,
            lifetime_written_bytes: 1 << 40,
            segments: 256,
            segment_bytes: 256 << 20,
            trouble: "reads fail (io)".to_string(),
            hint: "look for errors of the disk".to_string(),
        };
        let tier = TierInfo {
            name: "ssd".to_string(),
            state: "sick".to_string(),
            why: "io".to_string(),
            blocks: 12_345,
            loading_blocks: 4,
            late_bytes: 196_608,
            waiting_blocks: 17,
            storing_blocks: 9,
            promoted_blocks: 1_000,
            hits: 990,
            stored_blocks: 10_922,
            evicted_blocks: 55,
            touched_blocks: 700,
            lost_blocks: 7,
            disks: vec![disk],
            stores: Vec::new(),
            purge: Some(TierPurge { namespaces: 2, removed_blocks: 1_400_000, walked_ratio: Some(0.25) }),
        };
        let store = |name: &str, is_healthy: bool, trouble: &str| StoreInfo {
            name: name.to_string(),
            is_healthy,
            trouble: trouble.to_string(),
            ..StoreInfo::default()
        };
        let events = [("connections_lost", 3), ("lost_steps", 1), ("redirects", 0)];
        let server = StoreInfo {
            connections: Some(0),
            trouble_age_seconds: Some(75),
            events: events.map(|(event, count)| (event.to_string(), count)).into(),
            ..store("cache.internal:6379", false, "it refused the connection: WRONGPASS\u{1b}[31m")
        };
        let directory = StoreInfo {
            used_bytes: Some(3 << 30),
            capacity_bytes: Some(4 << 40),
            hanging_threads: Some(0),
            is_sweeper: Some(true),
            ..store("/mnt/kv", true, "")
        };
        let unknown = StoreInfo {
            used_bytes: None,
            is_sweeper: Some(false),
            ..StoreInfo { name: "/mnt/more".to_string(), ..directory.clone() }
        };
        let shared = TierInfo {
            name: "redis".to_string(),
            state: "serving".to_string(),
            stores: vec![server, directory, unknown],
            ..TierInfo::default()
        };
        InspectReply {
            boot_id: 0xfeed,
            pool_id: vec![0xab; 16],
            capacity_bytes: 4 << 30,
            populated_bytes: 2 << 30,
            huge_bytes: 2 << 30,
            nodes: vec![NodeBytes { node: 0, bytes: 1 << 30 }, NodeBytes { node: 1, bytes: 1 << 30 }],
            namespaces: vec![
                namespace(
                    0xbb,
                    &[("model", "llama"), ("tenant", "blue\u{1b}[31m")],
                    &[(1, 4096, 0), (0, 196_608, 1234)],
                ),
                namespace(0xaa, &[("model", "other")], &[(0, 65_536, 7)]),
            ],
            sessions: vec![session("engine-b", 2, false), session("engine-a", 1, true)],
            classes: vec![
                ClassInfo { slot_bytes: 196_608, slots: 2000, ready: 1234, free: 702, pinned: 100, draining: 64 },
                ClassInfo { slot_bytes: 4096, slots: 0, ready: 0, free: 0, pinned: 0, draining: 0 },
            ],
            pinned_bytes: 164 * 196_608,
            fenced_bytes: 0,
            tiers: vec![tier, shared],
            saved_tokens: 1_234_567,
            saved_prefill_us: 89_000_000,
            version: "0.1.0".to_string(),
            revision: "0123456789ab".to_string(),
            policy: "default".to_string(),
            core_wait_us: 0,
            core_quota: 0.0,
            runs: 0,
            uptime_seconds: 3 * 86_400 + 7 * 3600 + 59,
            keys: 3000,
            hits: 2000,
            used_bytes: 1298 * 196_608,
            pool_trouble: "2.0 GiB of 4.0 GiB populated: no memory for the rest".to_string(),
            pauses: vec![
                PauseInfo { tenant: "blue\u{1b}[31m".to_string(), seconds: Some(3590), ..PauseInfo::default() },
                PauseInfo { namespace_id: vec![0xaa; 16], seconds: None, ..PauseInfo::default() },
            ],
            users: vec![
                UserInfo { uid: 0, connections: 1, calls: 1, ..UserInfo::default() },
                UserInfo {
                    uid: 1000,
                    connections: 256,
                    sessions: 12,
                    calls: 40,
                    bytes: 3 << 20,
                    lent_bytes: 48 << 20,
                    refused: [("connections_per_user", 9), ("calls_per_user", 2)]
                        .map(|(limit, count)| (limit.to_string(), count))
                        .into(),
                },
            ],
        }
    }

    #[test]
    fn the_text_is_the_golden_one_in_whatever_order_the_daemon_answers() {
        let mut reply = reply();
        sort(&mut reply);
        let text = to_text(&reply);
        crate::golden::assert_golden("tests/golden/inspect.txt", &text);
        reply.namespaces.reverse();
        reply.sessions.reverse();
        sort(&mut reply);
        assert_eq!(to_text(&reply), text);
    }

    #[test]
    fn what_is_free_has_memory_and_huge_pages_are_no_more_than_there_are_pages() {
        let reply = InspectReply {
            capacity_bytes: 60 << 20,
            populated_bytes: 32 << 20,
            used_bytes: 30 << 20,
            huge_bytes: 34 << 20,
            ..InspectReply::default()
        };
        let text = to_text(&reply);
        assert!(text.contains("30.0 MiB of 60.0 MiB are used, 2.0 MiB are free"), "{text}");
        assert!(text.contains("huge pages  32.0 MiB"), "{text}");
    }

    #[test]
    fn an_id_has_as_many_digits_as_tell_it_from_the_others() {
        let named = |ids: &[u128]| {
            let named =
                |id: &u128| NamespaceInfo { namespace_id: id.to_be_bytes().to_vec(), ..NamespaceInfo::default() };
            shown_digits(&ids.iter().map(named).collect::<Vec<_>>())
        };
        assert_eq!(named(&[]), 8);
        assert_eq!(named(&[1 << 127, 1 << 126]), 8);
        assert_eq!(named(&[1 << 88, 1 << 87]), 10);
        assert_eq!(named(&[1, 2]), 32);
    }

    #[test]
    fn json_tells_every_number_of_the_answer() {
        let mut reply = reply();
        sort(&mut reply);
        let json = to_json(&reply);
        assert_eq!(json["pool_id"], "ab".repeat(16));
        assert_eq!(json["namespaces"][1]["groups"][0]["ready_blocks"], 1234);
        assert_eq!(json["namespaces"][1]["fields"]["model"], "llama");
        assert_eq!(json["classes"][1]["pinned"], 100);
        assert_eq!(json["sessions"][0]["leased_blocks"], 100);
        assert_eq!(
            (&json["sessions"][0]["saved_tokens"], &json["saved_prefill_us"]),
            (&json!(12_345), &json!(89_000_000))
        );
        assert_eq!(json["sessions"][1]["is_connected"], false);
        assert_eq!(json["users"][1]["refused"]["connections_per_user"], 9);
        assert_eq!(json["tiers"][0]["waiting_blocks"], 17);
        assert_eq!(json["tiers"][0]["purge"]["removed_blocks"], 1_400_000);
        assert!(json["tiers"][1]["purge"].is_null());
        assert_eq!(json["tiers"][0]["disks"][0]["lifetime_written_bytes"], 1u64 << 40);
        assert_eq!(json["tiers"][1]["stores"][0]["events"]["connections_lost"], 3);
        assert_eq!(json["tiers"][1]["stores"][1]["capacity_bytes"], 4u64 << 40);
    }
}
