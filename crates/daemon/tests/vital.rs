//! A panic ends the process on whichever thread it is, also where a runtime would have caught it. The process is this
//! test, run once more: what it does then, the environment says.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

const PLACE: &str = "FOREBAY_TEST_PANICS_IN";
const SIGABRT: i32 = 6;

/// Panics there, and would go on for longer than the test waits.
fn panic_in(place: &str) {
    forebay_daemon::abort_on_panic();
    let told = place.to_owned();
    let run = move || -> () { panic!("it broke in a {told}") };
    match place {
        "thread" => drop(std::thread::Builder::new().name("relocate".into()).spawn(run).unwrap().join()),
        "guarded call" => drop(std::panic::catch_unwind(run)),
        _ => {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let _ = match place {
                "task" => runtime.block_on(async { tokio::spawn(async move { run() }).await }),
                _ => runtime.block_on(async { tokio::task::spawn_blocking(run).await }),
            };
        }
    }
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_panic_on_any_thread_ends_the_process_after_it_was_told() {
    if let Ok(place) = std::env::var(PLACE) {
        return panic_in(&place);
    }
    for place in ["thread", "task", "copy", "guarded call"] {
        let again = ["--exact", "a_panic_on_any_thread_ends_the_process_after_it_was_told", "--nocapture"];
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args(again).env(PLACE, place).env_remove("RUST_BACKTRACE").output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(SIGABRT), "{place}: {told}");
        for word in [&format!("it broke in a {place}"), "the daemon stops: thread `", "hint: ", "panic_in"] {
            assert!(told.contains(word), "`{word}` is missing: {told}");
        }
    }
}
