//! Three masters that share the slots, and slots that move while they are used.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::decorate::Timed;
use forebay_core::tier::{Health, Outcome, Tier};
use forebay_io::redis::{Mode, RedisConfig};
use rustix::process::Signal;

use crate::bed::{Bed, config, key, loaded, name_of};
use crate::conform::Suited;
use crate::fake::{Answer, Fake, Then, bulk, well_behaved};
use crate::purge::{OWN, emptied, empty};
use crate::servers::{Admin, BOTH, Kind, Server, until};

struct Cluster {
    nodes: Vec<Server>,
    ids: Vec<String>,
}

impl Cluster {
    fn start(kind: Kind) -> Cluster {
        let cluster = Cluster::apart(kind);
        cluster.form();
        cluster
    }

    /// The nodes before they know each other, or have slots.
    fn apart(kind: Kind) -> Cluster {
        let nodes: Vec<Server> = (0..3).map(|_| node(kind)).collect();
        let ids = nodes.iter().map(|node| node.admin().must(&["CLUSTER", "MYID"])).collect();
        Cluster { nodes, ids }
    }

    fn form(&self) {
        let nodes = &self.nodes;
        for (at, node) in nodes.iter().enumerate() {
            let slots = (0..16_384u32).filter(|slot| *slot as usize * 3 / 16_384 == at).map(|slot| slot.to_string());
            let words: Vec<String> = ["CLUSTER".to_string(), "ADDSLOTS".to_string()].into_iter().chain(slots).collect();
            let mut admin = node.admin();
            admin.must(&words);
            admin.must(&["CLUSTER", "MEET", "127.0.0.1", &nodes[0].port.unwrap().to_string()]);
        }
        let is_whole = |node: &Server| {
            let info = node.admin().ask(&["CLUSTER", "INFO"]);
            info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3")
        };
        until(|| nodes.iter().all(is_whole), || "the cluster does not form".to_string());
    }

    fn config(&self) -> RedisConfig {
        RedisConfig { mode: Mode::Cluster, connections: 2, ..config(&self.nodes[0].tcp_url()) }
    }

    fn slot_of(&self, name: &str) -> usize {
        self.nodes[0].admin().must(&["CLUSTER", "KEYSLOT", name]).parse().unwrap()
    }

    fn node_of(&self, name: &str) -> usize {
        self.slot_of(name) * 3 / 16_384
    }

    fn admin_for(&self, name: &str) -> Admin {
        self.nodes[self.node_of(name)].admin()
    }

    fn set_slot(&self, at: usize, slot: usize, state: &str, node: usize) {
        self.nodes[at].admin().must(&["CLUSTER", "SETSLOT", &slot.to_string(), state, &self.ids[node]]);
    }
}

/// A node of no cluster yet.
fn node(kind: Kind) -> Server {
    node_with(kind, &[])
}

fn node_with(kind: Kind, arguments: &[&str]) -> Server {
    let arguments = [&["--cluster-enabled", "yes", "--cluster-node-timeout", "60000"], arguments].concat();
    Server::on_port(kind, &arguments)
}

#[test]
fn a_cluster_is_a_tier() {
    for kind in BOTH {
        let cluster = Cluster::start(kind);
        forebay_io::conformance::check(&mut Suited::open(cluster.config(), &|name| cluster.admin_for(name)));
        let held = |node: &Server| node.admin().must(&["DBSIZE"]).parse::<u64>().unwrap();
        assert!(cluster.nodes.iter().all(|node| held(node) > 50), "all nodes hold blocks");
    }
}

#[test]
fn split_blocks_lie_on_one_node() {
    let cluster = Cluster::start(Kind::Valkey);
    let mut bed = Bed::ready(&RedisConfig { value_bytes: 4096, ..cluster.config() });
    bed.store_all(0..30, 9000);
    for number in 0..30 {
        assert_eq!(bed.look(number, 9000), loaded(number, 9000));
        let name = name_of(&key(number));
        let parts = [name.clone(), format!("{name}:1"), format!("{name}:2")];
        let words: Vec<_> = std::iter::once("EXISTS").chain(parts.iter().map(String::as_str)).collect();
        assert_eq!(cluster.admin_for(&name).must(&words), "3");
    }
}

#[test]
fn a_slot_that_has_moved_is_followed() {
    let cluster = Cluster::start(Kind::Valkey);
    let mut bed = Bed::ready(&cluster.config());
    let name = name_of(&key(7));
    let (slot, from) = (cluster.slot_of(&name), cluster.node_of(&name));
    let to = (from + 1) % 3;
    [to, from].into_iter().for_each(|node| cluster.set_slot(node, slot, "NODE", to));
    bed.store_all([7], 5000);
    assert_eq!(bed.look(7, 5000), loaded(7, 5000));
    let find = bed.find(7);
    assert_eq!(bed.run(&[find]), [Outcome::Found]);
    assert_eq!(cluster.nodes[to].admin().must(&["EXISTS", &name]), "1");
    let counters = bed.redis.report().counters;
    assert!(counters.redirects >= 2, "loads and lookups were both sent on: {counters:?}");
    assert_eq!(counters.connections_lost, 0);
}

#[test]
fn a_slot_that_is_moving_is_asked_for_at_both_ends() {
    for (kind, value_bytes, values) in [(Kind::Redis, 5000, "1"), (Kind::Valkey, 5000, "1"), (Kind::Valkey, 4096, "2")]
    {
        let cluster = Cluster::start(kind);
        let mut bed = Bed::ready(&RedisConfig { value_bytes, pipeline_bytes: 4096, ..cluster.config() });
        let name = name_of(&key(7));
        let (slot, from) = (cluster.slot_of(&name), cluster.node_of(&name));
        let to = (from + 1) % 3;
        cluster.set_slot(to, slot, "IMPORTING", from);
        cluster.set_slot(from, slot, "MIGRATING", to);
        bed.store_all([7], 5000);
        assert_eq!(bed.look(7, 5000), loaded(7, 5000));
        assert_eq!(bed.redis.report().counters.redirects, 2);
        let held = cluster.nodes[to].admin().must(&["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()]);
        assert_eq!(held, values, "the new owner holds it");
    }
}

#[test]
fn a_node_that_takes_no_writes_is_named_and_the_others_are_written() {
    let cluster = Cluster::start(Kind::Valkey);
    let mut bed = Bed::ready(&cluster.config());
    let mut first = 0;
    // Thirty blocks more, which all nodes share; how many were stored on each.
    let mut stored = |bed: &mut Bed| {
        let numbers: Vec<u64> = (first..first + 30).collect();
        first += 30;
        let stores: Vec<_> = (0..).zip(&numbers).map(|(slot, number)| bed.store(*number, slot, 4096)).collect();
        let outcomes = bed.run(&stores);
        bed.redis.advance(Duration::ZERO);
        let taken = numbers.iter().zip(outcomes).filter(|(_, outcome)| matches!(outcome, Outcome::Stored));
        let mut counts = [0; 3];
        taken.for_each(|(number, _)| counts[cluster.node_of(&name_of(&key(*number)))] += 1);
        counts
    };
    assert!(stored(&mut bed).iter().all(|count| *count > 0));
    let refuses = |bed: &Bed| bed.redis.report().refuses_writes;
    cluster.nodes[2].admin().must(&["CONFIG", "SET", "maxmemory", "1"]);
    until(
        || {
            let counts = stored(&mut bed);
            assert!(counts[0] > 0 && counts[1] > 0 && counts[2] == 0, "{counts:?}");
            refuses(&bed).is_some()
        },
        || "the refusals are not told".to_string(),
    );
    let told = refuses(&bed).unwrap();
    assert!(told.starts_with(&format!("`127.0.0.1:{}`: OOM ", cluster.nodes[2].port.unwrap())), "{told}");
    assert!(!told.contains("; "), "the others take writes: {told}");
    cluster.nodes[2].admin().must(&["CONFIG", "SET", "maxmemory", "0"]);
    until(
        || {
            assert!(stored(&mut bed)[2] > 0);
            refuses(&bed).is_none()
        },
        || "they are not over".to_string(),
    );
}

#[test]
fn a_node_that_is_gone_costs_its_own_blocks() {
    let mut cluster = Cluster::start(Kind::Valkey);
    cluster.nodes.iter().for_each(|node| {
        node.admin().must(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    });
    let mut bed = Bed::ready(&cluster.config());
    bed.store_all(0..60, 4096);
    let homes: Vec<_> = (0..60).map(|number| cluster.node_of(&name_of(&key(number)))).collect();
    cluster.nodes[2].kill();
    for (number, home) in (0..).zip(homes) {
        let outcome = bed.look(number, 4096);
        match home {
            2 => assert!(matches!(outcome, Outcome::Failed(_)), "block {number}: {outcome:?}"),
            _ => assert_eq!(outcome, loaded(number, 4096)),
        }
    }
    assert_eq!(bed.redis.health(), Health::Healthy, "two of three serve");
}

#[test]
fn a_node_that_hangs_is_left_alone_and_the_others_are_read() {
    let cluster = Cluster::start(Kind::Valkey);
    // Without breakers, what is asked of the node waits for as long as a connection may take to be made.
    let mut bed = Bed::ready(&RedisConfig { operation_timeout: Duration::from_secs(1), ..cluster.config() });
    bed.store_all(0..60, 4096);
    let (hung, well): (Vec<u64>, Vec<u64>) = (0..60).partition(|number| cluster.node_of(&name_of(&key(*number))) == 2);
    cluster.nodes[2].signal(Signal::STOP);
    let loads: Vec<_> = (0..).zip(&hung[..8]).map(|(slot, number)| bed.load(*number, slot, 4096)).collect();
    assert!(bed.run(&loads).iter().all(|outcome| matches!(outcome, Outcome::Failed(_))));
    let begun = Instant::now();
    for number in &well {
        assert_eq!(bed.look(*number, 4096), loaded(*number, 4096));
    }
    assert_eq!(bed.look(hung[9], 4096), Outcome::Failed(ErrorKind::Unavailable));
    let config = cluster.config();
    assert!(begun.elapsed() < config.connect_timeout / 2, "it was not waited for: {:?}", begun.elapsed());
    assert_eq!(bed.redis.report().counters.breakers_opened, 1);
    assert_eq!(bed.redis.health(), Health::Healthy, "two of three serve");
    cluster.nodes[2].signal(Signal::CONT);
    until(|| bed.look(hung[9], 4096) == loaded(hung[9], 4096), || "the node is not tried again".to_string());
}

#[test]
fn all_masters_are_emptied_of_a_namespace() {
    for kind in BOTH {
        let cluster = Cluster::start(kind);
        let mut bed = Bed::ready(&RedisConfig { value_bytes: 4096, ..cluster.config() });
        bed.store_all(0..60, 9000);
        cluster.nodes.iter().for_each(|node| assert_ne!(node.admin().must(&["DBSIZE"]), "0"));
        assert_eq!(emptied(&bed, &[OWN]), (60, 180));
        cluster.nodes.iter().for_each(|node| assert_eq!(node.admin().must(&["DBSIZE"]), "0"));
    }
}

#[test]
fn a_cluster_that_moves_a_slot_is_not_called_empty_before_it_has_come_to_rest() {
    let cluster = Cluster::start(Kind::Valkey);
    let mut bed = Bed::ready(&cluster.config());
    bed.store_all(0..60, 4096);
    let name = name_of(&key(7));
    let (slot, from) = (cluster.slot_of(&name), cluster.node_of(&name));
    let to = (from + 1) % 3;
    cluster.set_slot(to, slot, "IMPORTING", from);
    cluster.set_slot(from, slot, "MIGRATING", to);
    let (outcome, blocks, _) = empty(&bed, &[OWN]);
    let error = outcome.unwrap_err();
    assert!(error.to_string().contains("are moving") && error.hint_text().is_some(), "{error}");
    assert_eq!(blocks, 60, "all that could be seen is gone nonetheless");
    (0..3).for_each(|at| cluster.set_slot(at, slot, "NODE", to));
    assert_eq!(emptied(&bed, &[OWN]), (0, 0));
}

/// The map is the same before and after, and the scan may have missed what was elsewhere.
#[test]
fn a_slot_that_was_elsewhere_during_the_scan_costs_another_pass() {
    let (url, scans) = (Arc::new(Mutex::new(String::new())), Arc::new(AtomicUsize::new(0)));
    let (own, seen) = (url.clone(), scans.clone());
    let node = Fake::start_tcp(move |_| {
        let (own, scans) = (own.clone(), scans.clone());
        Box::new(move |command, store| {
            let words = command.get(1).map(Vec::as_slice);
            Answer::say(match (command[0].as_slice(), words) {
                (b"CLUSTER", Some(b"SLOTS")) => map_at(&own.lock().unwrap()),
                (b"CLUSTER", Some(b"NODES")) => bulk(b""),
                (b"CLUSTER", _) => {
                    let moves = scans.load(Ordering::Relaxed).min(1);
                    bulk(format!("cluster_state:ok\r\ncluster_current_epoch:{}\r\n", 6 + moves).as_bytes())
                }
                (b"SCAN", _) => {
                    scans.fetch_add(1, Ordering::Relaxed);
                    b"*2\r\n$1\r\n0\r\n*0\r\n".to_vec()
                }
                _ => well_behaved(command, store),
            })
        })
    });
    *url.lock().unwrap() = node.url();
    let bed = Bed::open(&RedisConfig { mode: Mode::Cluster, ..config(&node.url()) });
    assert_eq!(emptied(&bed, &[OWN]), (0, 0));
    assert_eq!(seen.load(Ordering::Relaxed), 2);
}

#[test]
fn a_master_that_is_gone_is_an_error_and_the_others_are_emptied() {
    let mut cluster = Cluster::start(Kind::Valkey);
    let mut bed = Bed::ready(&cluster.config());
    bed.store_all(0..60, 4096);
    // It is the first to be asked.
    let mut left: Vec<usize> = vec![0, 1, 2];
    left.sort_by_key(|at| cluster.nodes[*at].tcp_url());
    let gone = left.remove(0);
    cluster.nodes[gone].kill();
    let config = RedisConfig { urls: vec![cluster.nodes[left[0]].tcp_url()], ..cluster.config() };
    let (outcome, blocks, _) = empty(&Bed::open(&config), &[OWN]);
    let error = outcome.unwrap_err();
    let says = cluster.nodes[gone].port.unwrap().to_string();
    assert!(error.to_string().contains(&says) && error.hint_text().is_some(), "{error}");
    assert!((1..60).contains(&blocks), "{blocks}");
    left.iter().for_each(|at| assert_eq!(cluster.nodes[*at].admin().must(&["DBSIZE"]), "0"));
}

#[test]
fn a_block_whose_slot_nobody_has_is_unavailable_until_somebody_takes_it() {
    let cluster = Cluster::start(Kind::Valkey);
    let name = name_of(&key(7));
    let (slot, home) = (cluster.slot_of(&name).to_string(), cluster.node_of(&name));
    cluster.nodes.iter().for_each(|node| {
        node.admin().must(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
        node.admin().must(&["CLUSTER", "DELSLOTS", &slot]);
    });
    let mut bed = Bed::ready(&cluster.config());
    assert_eq!(bed.look(7, 4096), Outcome::Failed(ErrorKind::Unavailable));
    bed.store_all([1, 2, 3], 4096);
    cluster.nodes[home].admin().must(&["CLUSTER", "ADDSLOTS", &slot]);
    until(|| bed.look(7, 4096) == Outcome::Absent, || "the slot is not found".to_string());
}

#[test]
fn a_cluster_that_was_configured_as_one_server_says_so() {
    let cluster = Cluster::start(Kind::Valkey);
    let mut bed = Bed::open(&config(&cluster.nodes[0].tcp_url()));
    let elsewhere = (0..).find(|number| cluster.node_of(&name_of(&key(*number))) != 0).unwrap();
    assert!(matches!(bed.look(elsewhere, 4096), Outcome::Failed(_)));
    assert!(bed.redis.report().last_error.is_some_and(|(why, _)| why.contains("cluster")));
}

#[test]
fn a_node_that_has_left_the_cluster_is_not_believed() {
    for kind in BOTH {
        let (cluster, left) = (Cluster::start(kind), node(kind));
        let urls = vec![left.tcp_url(), cluster.nodes[1].tcp_url()];
        let mut bed = Bed::ready(&RedisConfig { urls, ..cluster.config() });
        bed.store_all(0..30, 4096);
        assert_eq!(bed.look(7, 4096), loaded(7, 4096), "{kind:?}");
    }
}

#[test]
fn a_cluster_that_is_made_after_the_start_is_found_and_says_until_then_what_it_lacks() {
    for kind in BOTH {
        let cluster = Cluster::apart(kind);
        let mut bed = Bed::open(&cluster.config());
        assert_eq!(bed.look(7, 4096), Outcome::Failed(ErrorKind::Unavailable), "{kind:?}");
        let store = bed.store(7, 0, 4096);
        assert_eq!(bed.run(&[store]), [Outcome::Failed(ErrorKind::Unavailable)], "{kind:?}");
        assert_eq!(bed.redis.health(), Health::Sick(ErrorKind::Unavailable));
        let (why, _) = bed.redis.report().last_error.expect("there was an error");
        let says = format!("127.0.0.1:{}: it knows no node that has slots", cluster.nodes[0].port.unwrap());
        assert!(why.contains(&says) && why.contains("hint:"), "{why}");
        cluster.form();
        bed.await_service();
        bed.store_all(0..30, 4096);
    }
}

/// A server that has each map of slots from `maps` once, the last one for ever, and counts the questions.
fn teller(maps: Vec<Vec<u8>>) -> (Fake, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let fake = Fake::start_tcp(move |_| {
        let (maps, count) = (maps.clone(), count.clone());
        Box::new(move |command, store| match command[0].as_slice() {
            b"CLUSTER" if command[1] == b"SLOTS" => {
                Answer::say(maps[count.fetch_add(1, Ordering::Relaxed).min(maps.len() - 1)].clone())
            }
            _ => Answer::say(well_behaved(command, store)),
        })
    });
    (fake, asked)
}

/// A node that speaks for a cluster, and can be made to believe that it is down: then it serves nobody.
fn fake_node(
    map: impl Fn() -> Vec<u8> + Clone + Send + 'static,
    is_down: Arc<AtomicBool>,
    reads_when_down: bool,
) -> Fake {
    Fake::start_tcp(move |_| {
        let (map, is_down) = (map.clone(), is_down.clone());
        Box::new(move |command, store| {
            let (is_down, words) = (is_down.load(Ordering::Relaxed), command.get(1).map(Vec::as_slice));
            Answer::say(match (command[0].as_slice(), words) {
                (b"CLUSTER", Some(b"SLOTS")) => map(),
                (b"CLUSTER", Some(b"NODES")) => bulk(b""),
                (b"CLUSTER", _) if is_down => bulk(b"cluster_enabled:1\r\ncluster_state:fail\r\n"),
                (b"CLUSTER", _) => bulk(b"cluster_state:ok\r\n"),
                (b"SCAN", _) => {
                    let names: Vec<u8> = store.keys().flat_map(|name| bulk(name)).collect();
                    [format!("*2\r\n$1\r\n0\r\n*{}\r\n", store.len()).into_bytes(), names].concat()
                }
                (b"GET" | b"EXISTS" | b"SET", _) if is_down && !(reads_when_down && command[0] != b"SET") => {
                    b"-CLUSTERDOWN The cluster is down\r\n".to_vec()
                }
                _ => well_behaved(command, store),
            })
        })
    })
}

/// A cluster of one node, which is then cut off; the other one has its slots from then on.
struct Split {
    nodes: [Fake; 2],
    is_down: Arc<AtomicBool>,
}

impl Split {
    fn start() -> Split {
        let (is_down, urls) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::<String>::new())));
        let map = |is_of_second: fn(bool) -> bool| {
            let (is_down, urls) = (is_down.clone(), urls.clone());
            move || map_at(&urls.lock().unwrap()[usize::from(is_of_second(is_down.load(Ordering::Relaxed)))])
        };
        let nodes = [
            fake_node(map(|_| false), is_down.clone(), false),
            fake_node(map(|is_down| is_down), Arc::default(), false),
        ];
        *urls.lock().unwrap() = nodes.iter().map(Fake::url).collect();
        Split { nodes, is_down }
    }

    fn config(&self) -> RedisConfig {
        RedisConfig { mode: Mode::Cluster, ..config(&self.nodes[0].url()) }
    }

    fn both(&self) -> RedisConfig {
        RedisConfig { urls: self.nodes.iter().map(Fake::url).collect(), ..self.config() }
    }
}

#[test]
fn a_master_that_was_cut_off_is_left_for_the_one_that_has_its_slots() {
    let split = Split::start();
    let mut bed = Bed::ready(&split.both());
    bed.store_all([7], 4096);
    split.is_down.store(true, Ordering::Relaxed);
    until(|| bed.look(7, 4096) == Outcome::Absent, || "the new master is not found".to_string());
    bed.store_all([7, 8], 4096);
    assert_eq!(bed.look(8, 4096), loaded(8, 4096));
}

#[test]
fn a_node_that_is_cut_off_is_not_believed_if_another_one_is_not() {
    let split = Split::start();
    split.is_down.store(true, Ordering::Relaxed);
    let mut bed = Bed::ready(&split.both());
    bed.store_all([7], 4096);
    assert_eq!(bed.redis.report().servers, [split.nodes[1].url().replace("redis://", "")]);
}

#[test]
fn a_cluster_that_is_down_and_lets_us_read_is_read() {
    let (is_down, url) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(String::new())));
    let own = url.clone();
    let node = fake_node(move || map_at(&own.lock().unwrap()), is_down.clone(), true);
    *url.lock().unwrap() = node.url();
    let config = RedisConfig { mode: Mode::Cluster, ..config(&node.url()) };
    Bed::ready(&config).store_all([7], 4096);
    is_down.store(true, Ordering::Relaxed);
    let mut bed = Bed::ready(&config);
    assert_eq!(bed.look(7, 4096), loaded(7, 4096));
    assert!(bed.redis.report().last_error.is_some_and(|(why, _)| why.contains("cluster_state:fail")));
}

#[test]
fn a_purge_does_not_believe_a_node_that_has_left_the_cluster() {
    for kind in BOTH {
        let (cluster, left) = (Cluster::start(kind), node(kind));
        Bed::ready(&cluster.config()).store_all(0..60, 4096);
        let urls = [vec![left.tcp_url()], vec![left.tcp_url(), cluster.nodes[1].tcp_url()]];
        let [alone, both] = urls.map(|urls| Bed::open(&RedisConfig { urls, ..cluster.config() }));
        let error = empty(&alone, &[OWN]).0.unwrap_err();
        let says = left.port.unwrap().to_string();
        assert!(error.to_string().contains(&says) && error.hint_text().is_some(), "{error}");
        assert_eq!(emptied(&both, &[OWN]), (60, 60), "{kind:?}");
        cluster.nodes.iter().for_each(|node| assert_eq!(node.admin().must(&["DBSIZE"]), "0"));
    }
}

#[test]
fn a_purge_takes_a_map_only_if_it_has_all_slots() {
    let cluster = Cluster::start(Kind::Valkey);
    cluster.nodes.iter().for_each(|node| {
        node.admin().must(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
        node.admin().must(&["CLUSTER", "DELSLOTS", "7"]);
    });
    let error = empty(&Bed::open(&cluster.config()), &[OWN]).0.unwrap_err();
    assert!(error.to_string().contains("16383 of 16384 slots") && error.hint_text().is_some(), "{error}");
}

#[test]
fn a_purge_empties_the_master_that_was_cut_off_and_the_one_that_has_its_slots() {
    let split = Split::start();
    Bed::ready(&split.config()).store_all([7], 4096);
    split.is_down.store(true, Ordering::Relaxed);
    let mut bed = Bed::ready(&split.both());
    bed.store_all([7, 8], 4096);
    assert_eq!(emptied(&bed, &[OWN]), (3, 3));
    let error = empty(&Bed::open(&split.config()), &[OWN]).0.unwrap_err();
    assert!(error.to_string().contains("cluster_state:fail") && error.hint_text().is_some(), "{error}");
}

/// Its master does not name it any more, and the map does.
#[test]
fn a_purge_waits_for_a_replica_that_the_map_names() {
    std::thread::scope(|scope| BOTH.iter().for_each(|kind| drop(scope.spawn(|| check_replica(*kind)))));
}

/// The replica follows the first node, and all maps name it.
fn let_follow(cluster: &Cluster, replica: &Server) {
    let port = replica.port.unwrap().to_string();
    replica.admin().must(&["CLUSTER", "MEET", "127.0.0.1", &cluster.nodes[0].port.unwrap().to_string()]);
    let follow = || replica.admin().ask(&["CLUSTER", "REPLICATE", &cluster.ids[0]]) == "OK";
    until(follow, || "the replica does not know its master".to_string());
    let is_named = |node: &Server| node.admin().must(&["CLUSTER", "SLOTS"]).contains(&port);
    until(|| cluster.nodes.iter().all(is_named), || "the maps do not name the replica".to_string());
}

fn check_replica(kind: Kind) {
    let (cluster, replica) = (Cluster::start(kind), node(kind));
    let_follow(&cluster, &replica);
    let (nodes, port) = (&cluster.nodes, replica.port.unwrap().to_string());
    let timeouts = Duration::from_secs(4);
    let config = RedisConfig { connect_timeout: timeouts, operation_timeout: timeouts, ..cluster.config() };
    let mut bed = Bed::ready(&config);
    bed.store_all(0..60, 4096);
    let held = |node: &Server| node.admin().must(&["DBSIZE"]);
    until(|| held(&replica) == held(&nodes[0]), || "the replica does not follow".to_string());
    replica.signal(Signal::STOP);
    nodes[0].admin().must(&["CLIENT", "KILL", "TYPE", "replica"]);
    let error = empty(&bed, &[OWN]).0.expect_err("a replica has all blocks, and may take over");
    assert!(error.to_string().contains(&port) && error.hint_text().is_some(), "{error}");
    replica.signal(Signal::CONT);
    assert_eq!(emptied(&bed, &[OWN]), (0, 0), "{kind:?}");
    assert_eq!(held(&replica), "0");
}

/// It has its blocks from its own file, and nothing from its master since it started.
#[test]
fn a_purge_waits_for_a_replica_that_newer_maps_leave_out() {
    std::thread::scope(|scope| BOTH.iter().for_each(|kind| drop(scope.spawn(|| check_left_out(*kind)))));
}

fn check_left_out(kind: Kind) {
    let (cluster, mut replica) = (Cluster::start(kind), node_with(kind, &["--appendonly", "yes"]));
    let_follow(&cluster, &replica);
    let (nodes, port) = (&cluster.nodes, replica.port.unwrap().to_string());
    let mut bed = Bed::ready(&cluster.config());
    bed.store_all(0..60, 4096);
    let held = |node: &Server| node.admin().must(&["DBSIZE"]);
    until(|| held(&replica) == held(&nodes[0]), || "the replica does not follow".to_string());
    // It writes its file to the end.
    replica.admin().ask(&["SHUTDOWN"]);
    replica.kill();
    // Its master knows no password, and refuses it.
    std::fs::write(replica.directory.path().join("conf"), "masterauth old\n").unwrap();
    replica.restart();
    let has_kept = || replica.admin().ask(&["DBSIZE"]) == held(&nodes[0]);
    until(has_kept, || "the replica has not kept its blocks".to_string());
    let (outcome, removed, _) = empty(&bed, &[OWN]);
    let error = outcome.expect_err("a replica has blocks, and may take over");
    assert!(error.to_string().contains(&port) && error.hint_text().is_some(), "{error}");
    assert_eq!((error.kind(), removed), (ErrorKind::Unavailable, 60), "{kind:?}");
    replica.admin().must(&["CONFIG", "SET", "masterauth", ""]);
    assert_eq!(emptied(&bed, &[OWN]), (0, 0), "{kind:?}");
    assert_eq!(held(&replica), "0");
}

/// The configured node and a master that was replaced have not heard of it yet.
#[test]
fn a_purge_asks_the_masters_that_a_map_names_for_those_that_took_over() {
    let is_up = Arc::<AtomicBool>::default();
    let maps = Arc::new(Mutex::new([Vec::new(), Vec::new()]));
    let node = |of: usize| {
        let maps = maps.clone();
        fake_node(move || maps.lock().unwrap()[of].clone(), is_up.clone(), false)
    };
    let [late, replaced, new, other] = [0, 0, 1, 1].map(node);
    *maps.lock().unwrap() = [&replaced, &new].map(|second| map_over(&[&late, second, &other].map(Fake::url)));
    let at = |node: &Fake| RedisConfig { mode: Mode::Cluster, ..config(&node.url()) };
    Bed::ready(&at(&other)).store_all(0..60, 4096);
    assert_eq!(emptied(&Bed::open(&at(&late)), &[OWN]), (60, 60));
}

/// All slots at this server.
fn map_of(server: &Fake) -> Vec<u8> {
    map_at(&server.url())
}

fn map_at(url: &str) -> Vec<u8> {
    map_over(&[url.to_owned()])
}

/// All slots, in shares that differ by one at most.
fn map_over(urls: &[String]) -> Vec<u8> {
    let mut map = format!("*{}\r\n", urls.len());
    for (at, url) in urls.iter().enumerate() {
        let (first, last) = (16384 * at / urls.len(), 16384 * (at + 1) / urls.len() - 1);
        let port = url.rsplit_once(':').unwrap().1;
        map += &format!("*3\r\n:{first}\r\n:{last}\r\n*2\r\n$9\r\n127.0.0.1\r\n:{port}\r\n");
    }
    map.into_bytes()
}

#[test]
fn the_last_map_is_kept_where_a_node_has_none_any_more() {
    let closes = Arc::new(AtomicBool::new(false));
    let is_told = closes.clone();
    let server = Fake::start_tcp(move |_| {
        let closes = is_told.clone();
        Box::new(move |command, store| {
            let then = if closes.swap(false, Ordering::Relaxed) { Then::Close } else { Then::GoOn };
            Answer { then, ..Answer::say(well_behaved(command, store)) }
        })
    });
    let (teller, asked) = teller(vec![map_of(&server), map_of(&server), b"*0\r\n".to_vec()]);
    // Two threads ask once each.
    let mut bed = Bed::ready(&RedisConfig { mode: Mode::Cluster, connections: 1, ..config(&teller.url()) });
    bed.store_all([7], 4096);
    until(
        || {
            // A connection that ends is a reason to ask again.
            closes.store(true, Ordering::Relaxed);
            bed.look(7, 4096);
            asked.load(Ordering::Relaxed) > 4
        },
        || "the map is not asked for again".to_string(),
    );
    closes.store(false, Ordering::Relaxed);
    until(|| bed.look(7, 4096) == loaded(7, 4096), || "the map was lost".to_string());
}

#[test]
fn what_waits_for_a_map_waits_no_longer_than_an_operation_may_take() {
    let teller = Fake::start_tcp(|_| Box::new(|_, _| Answer { then: Then::Hang, ..Answer::say("") }));
    let config = RedisConfig { mode: Mode::Cluster, ..config(&teller.url()) };
    let mut bed = Bed::open(&RedisConfig { operation_timeout: Duration::from_millis(500), ..config });
    assert_eq!(bed.look(7, 4096), Outcome::Failed(ErrorKind::Timeout), "not unavailable, when the connection ends");
}

#[test]
fn a_node_without_slots_that_is_still_connected_does_not_make_the_tier_healthy() {
    let (is_down, gone) = (Arc::new(AtomicBool::new(false)), map_at("redis://127.0.0.1:1"));
    let own = gone.clone();
    let server = fake_node(move || own.clone(), is_down.clone(), false);
    let (teller, _) = teller(vec![map_of(&server), map_of(&server), gone]);
    let mut bed = Bed::ready(&RedisConfig { mode: Mode::Cluster, connections: 1, ..config(&teller.url()) });
    bed.store_all([7], 4096);
    is_down.store(true, Ordering::Relaxed);
    until(
        || {
            bed.look(7, 4096);
            bed.redis.health() == Health::Sick(ErrorKind::Unavailable)
        },
        || "the tier is called healthy, and no node with slots is there".to_string(),
    );
}
