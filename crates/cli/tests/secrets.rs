//! Secrets in files of their own, behind the shipped daemon and a server that asks for a password.

mod command;
#[path = "../../io/tests/redis/servers.rs"]
#[allow(dead_code, reason = "each test binary uses its own part")]
mod servers;
mod support;

use std::fs::{Permissions, set_permissions, write};
use std::os::unix::fs::{PermissionsExt, symlink};

use servers::{Kind, Server};
use support::tiers::{BYTES, is_served, lose_pool, store};
use support::*;

const PASSWORD: &str = "s3cret p@ss:w/rd";

#[test]
fn a_password_in_a_mounted_file_opens_the_server_and_stands_nowhere() {
    let server = Server::on_port(Kind::Valkey, &["--requirepass", PASSWORD]);
    // As Kubernetes mounts a secret: a link into a directory that is a link, to a file that all may read.
    let home = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(home.path().join("..now")).expect("ours");
    write(home.path().join("..now/password"), format!("{PASSWORD}\n")).expect("ours");
    set_permissions(home.path().join("..now/password"), Permissions::from_mode(0o644)).expect("ours");
    symlink("..now", home.path().join("..data")).expect("ours");
    symlink("..data/password", home.path().join("password")).expect("ours");
    let (url, file) = (server.tcp_url(), home.path().join("password"));
    let file = file.to_str().expect("UTF-8");
    let tier = ["--tier.redis.urls", &url, "--tier.redis.password_file", file];

    let place = Place::new();
    let (daemon, client, worker) = support::tiers::serving(&place, &tier);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..100);
    assert!(daemon.log().contains("defaultMode") && !daemon.log().contains("s3cret"), "{}", daemon.log());
    lose_pool(&place, daemon, (client, worker));
    let _daemon = Daemon::start(&place, &[&["--pool.capacity_bytes", "16MiB"][..], &tier].concat());
    let (client, worker) = engine(&place, "a", BYTES);
    wait_until("the tier serves", || support::tiers::tier(&client, "redis").state == "serving");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    is_served(&client, &worker, namespace, 0..50);

    let shown = command::run(&[&["config"][..], &tier].concat());
    assert!(shown.out.contains(&format!("tier.redis.password_file = \"{file}\"")), "{}", shown.out);
    let judged = command::run(&[&["doctor"][..], &tier].concat());
    assert!(!format!("{shown:?}{judged:?}").contains("s3cret"));
}

#[test]
fn the_user_of_the_urls_has_its_password_in_the_file() {
    let server = Server::on_port(Kind::Valkey, &[]);
    server.admin().must(&["ACL", "SETUSER", "fb", "on", &format!(">{PASSWORD}"), "~forebay:*", "+@all"]);
    server.admin().must(&["ACL", "SETUSER", "default", "off"]);
    let home = tempfile::tempdir().expect("a directory");
    let file = home.path().join("password");
    write(&file, PASSWORD).expect("ours");
    set_permissions(&file, Permissions::from_mode(0o600)).expect("ours");
    let url = server.tcp_url().replace("redis://", "redis://fb@");
    let tier = ["--tier.redis.urls", &url, "--tier.redis.password_file", file.to_str().expect("UTF-8")];
    let judged = command::run(&[&["doctor"][..], &tier].concat());
    assert!(judged.out.contains("` answers"), "{judged:?}");
    let place = Place::new();
    let (_daemon, client, worker) = support::tiers::serving(&place, &tier);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..10);
}

#[test]
fn a_password_that_is_given_twice_or_cannot_be_read_stops_the_start_with_a_hint() {
    let home = tempfile::tempdir().expect("a directory");
    let file = home.path().join("password");
    write(&file, PASSWORD).expect("ours");
    let file = file.to_str().expect("UTF-8");
    let (plain, with_password) = ("redis://127.0.0.1:1", "redis://u:s3cret@127.0.0.1:1");
    let sentinels = ["--tier.redis.mode", "sentinel", "--tier.redis.sentinel_master", "m"];
    let both = ["--tier.redis.sentinel_password", "s3cret", "--tier.redis.sentinel_password_file", file];
    let cases: [(&str, Vec<&str>, &str); 3] = [
        (with_password, vec!["--tier.redis.password_file", file], "`tier.redis.urls` cannot be"),
        (plain, vec!["--tier.redis.password_file", "/no/such/file"], "cannot read the file of a secret"),
        (plain, [&sentinels[..], &both].concat(), "sentinel_password_file"),
    ];
    for (url, more, says) in cases {
        let arguments = [&["--tier.redis.urls", url][..], &more].concat();
        let (is_success, log) = Daemon::spawn(&Place::new(), &arguments).finish();
        assert!(!is_success && log.contains(says) && log.contains("hint: ") && !log.contains("s3cret"), "{log}");
    }
}

#[test]
fn a_url_that_cannot_be_is_refused_under_its_key_and_prints_no_password() {
    for url in ["redis://127.0.0.1?password=s3cret", "redis://u:s3cret", "redis://u:***@127.0.0.1", "s3cret@127.0.0.1"]
    {
        for command in ["config", "doctor", "serve"] {
            let refused = command::run(&[command, "--tier.redis.urls", url]);
            refused.assert_refused(2, "`tier.redis.urls` cannot be `[");
            let names = refused.err.contains("(from=`flag`)") && refused.err.contains("hint: it must hold URLs, and `");
            assert!(names && !refused.err.contains("s3cret"), "{}", refused.err);
        }
    }
    let sentinels = ["--tier.redis.mode", "sentinel", "--tier.redis.sentinel_master", "m"];
    let masked = ["--tier.redis.urls", "redis://127.0.0.1:1", "--tier.redis.sentinel_password", "***"];
    let refused = command::run(&[&["config"][..], &sentinels, &masked].concat());
    refused.assert_refused(2, "`tier.redis.sentinel_password` cannot be `***`");
}
