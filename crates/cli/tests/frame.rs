//! The frame of a real daemon under load: what it says agrees with the metrics of the same moment, and its parts with
//! each other.

mod support;

use std::collections::BTreeSet;
use std::time::Instant;

use forebay_rpc::proto::{FrameReply, FrameRequest};
use serde_json::Value;
use support::tiers::{is_served, store};
use support::*;

fn metric(page: &str, name: &str) -> u64 {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    page.lines().find_map(value).unwrap_or_else(|| panic!("no {name}"))
}

/// The body of `/frame.json`.
fn json(daemon: &Daemon, query: &str) -> Value {
    let page = daemon.page(&format!("/frame.json{query}"));
    let body = page.split_once("\r\n\r\n").expect("a head and a body").1;
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {page}"))
}

fn ask(client: &Client, request: FrameRequest) -> FrameReply {
    call!(client, frame, request).expect("a frame")
}

fn sum(list: &Value, field: &str) -> u64 {
    list.as_array().expect("a list").iter().map(|part| part[field].as_u64().expect("a whole number")).sum()
}

/// A daemon with a disk, after an engine has asked for blocks of the pool, of the disk and of nobody.
fn loaded(place: &Place) -> (Daemon, Client, Worker) {
    let disk = place.pool().with_file_name("disk");
    let disk = disk.to_str().expect("a path in UTF-8");
    let arguments = ["--pool.capacity_bytes", "16MiB", "--http.address", "127.0.0.1:0", "--tier.ssd.disks", disk];
    let more = ["--tier.ssd.capacity_bytes", "64MiB", "--tier.ssd.admission", "all"];
    let daemon = Daemon::start(place, &[&arguments[..], &more].concat());
    let (client, worker) = engine(place, "a", support::tiers::BYTES);
    wait_until("the disk serves", || support::tiers::tier(&client, "ssd").state == "serving");
    let namespace = client.namespace("blue", vec![group()]).unwrap();
    // The pool holds 819 of them.
    store(&client, &worker, namespace, 0..1200);
    (0..6).for_each(|prompt| is_served(&client, &worker, namespace, prompt * 50..prompt * 50 + 50));
    is_served(&client, &worker, namespace, 0..50);
    client.lookup_settled(namespace, &hashes(9000..9040));
    (daemon, client, worker)
}

#[test]
fn a_frame_says_what_the_metrics_say_and_its_parts_add_up() {
    let place = Place::new();
    let (daemon, client, _worker) = loaded(&place);
    // Of a moment after the last lookup: a frame is up to a second old.
    let keys = metric(&daemon.page("/metrics"), "forebay_lookup_keys_total");
    wait_until("a frame of all lookups", || json(&daemon, "")["lookups"]["keys"] == keys);
    let (frame, page) = (json(&daemon, ""), daemon.page("/metrics"));
    let of_tier = |name: &str| metric(&page, &format!("forebay_lookup_hits_by_tier_total{{tier=\"{name}\"}}"));
    for (tier, name) in frame["tiers"].as_array().unwrap().iter().zip(["pool", "ssd"]) {
        assert_eq!((&tier["name"], &tier["hits"]), (&name.into(), &of_tier(name).into()));
    }
    assert!(of_tier("ssd") >= 250, "most came from the disk: {frame}");
    let hits = metric(&page, "forebay_lookup_hits_total");
    assert_eq!((sum(&frame["tiers"], "hits"), &frame["lookups"]["hits"]), (hits, &hits.into()));
    assert_eq!(sum(&frame["misses"], "keys") + hits, keys);
    assert_eq!((sum(&frame["engines"], "keys"), sum(&frame["engines"], "hits")), (keys, hits));
    assert_eq!(sum(&frame["namespaces"], "ready_bytes"), sum(&frame["tenants"], "ready_bytes"));
    assert_eq!((&frame["tenants"][0]["tenant"], &frame["engines"][0]["state"]), (&"blue".into(), &"ready".into()));
    let pool = &frame["pool"];
    assert_eq!(pool["used_bytes"], metric(&page, "forebay_pool_used_bytes"));
    assert_eq!(pool["capacity_bytes"], 16 << 20);
    assert_eq!((&frame["is_live"], &frame["is_ready"]), (&true.into(), &true.into()));
    let ssd = &frame["tiers"][1];
    assert_eq!((&ssd["held_blocks"], &ssd["trouble"], &ssd["is_shared"]), (&1200.into(), &"".into(), &false.into()));
    assert!(ssd["p99_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{ssd}");
    // Over the socket it is the same, and as JSON it has the same names.
    wait_until("both ways to ask in one second", || {
        let (page, socket) = (json(&daemon, ""), ask(&client, FrameRequest::default()));
        // Both are read from text, since `serde_json` rounds some of the numbers that it reads.
        page == serde_json::from_str::<Value>(&serde_json::to_string(&socket).unwrap()).unwrap()
    });
}

#[test]
fn however_many_ask_a_frame_is_made_once_a_second() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB", "--http.address", "127.0.0.1:0"]);
    let (start, mut made, mut asked) = (Instant::now(), BTreeSet::new(), 0);
    while made.len() < 4 {
        made.insert(json(&daemon, "")["at_ms"].as_u64().unwrap());
        asked += 1;
    }
    let took = start.elapsed();
    assert!(took.as_secs_f64() > 2.9 && asked > 4, "{asked} questions in {took:?}: {made:?}");
}

#[test]
fn a_reader_gets_the_steps_that_it_lacks() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB", "--http.address", "127.0.0.1:0"]);
    wait_until("two steps", || json(&daemon, "")["hour"]["last"].as_u64() >= Some(2));
    let first = json(&daemon, "");
    let last = first["hour"]["last"].as_u64().unwrap();
    let steps = |frame: &Value| frame["hour"]["end_ms"].as_array().unwrap().len() as u64;
    assert_eq!(steps(&first), last);
    let boot = first["boot"].as_str().unwrap();
    let next = json(&daemon, &format!("?boot={boot}&hour_last={}&day_last=0", last - 1));
    assert_eq!(steps(&next), next["hour"]["last"].as_u64().unwrap() - (last - 1));
    let (hour, of_reader) = (&next["hour"], steps(&next) as usize);
    for list in ["keys_per_second", "hit_ratio", "used_bytes", "lookup_p99_seconds"] {
        assert_eq!(hour[list].as_array().unwrap().len(), of_reader, "{list}");
    }
    assert!(hour["hit_ratio"][0].is_null() && hour["tiers"][0]["hits_per_second"][0].as_f64() == Some(0.0));
    let restarted = json(&daemon, &format!("?boot=0&hour_last={last}"));
    assert_eq!(steps(&restarted), restarted["hour"]["last"].as_u64().unwrap(), "numbers of another start say nothing");
    assert!(daemon.page("/frame.json?hour_last=x").contains("the parameters of /frame.json are"));
}
