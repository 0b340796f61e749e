//! `forebay health`: whether the daemon is alive and ready, for the probes of systemd, Kubernetes and scripts.

use std::io::stdout;
use std::time::Duration;

use forebay_rpc::proto::HealthCheck;
use serde_json::{Value, json};

use crate::arguments::Health;
use crate::client::connect_within;
use crate::failure::Failure;
use crate::output::{Colour, escaped, is_coloured, painted, print, print_json};
use crate::serve::runtime;

pub fn run(arguments: &Health) -> Result<(), Failure> {
    let deadline = Duration::from_secs(arguments.timeout.into());
    let mut client = connect_within(&arguments.daemon.socket_directory()?, deadline);
    let claim = if arguments.live { "alive" } else { "ready" };
    let checks = match runtime()?.block_on(client.health()) {
        Ok(reply) if arguments.live => reply.live,
        Ok(reply) => reply.ready,
        Err(error) => {
            // Whoever reads objects gets one also where nobody answers.
            let check = HealthCheck { name: "daemon".into(), finding: "fail".into(), why: error.to_string() };
            if arguments.json {
                print_json(&to_json(claim, false, &[check]));
            }
            return Err(error.into());
        }
    };
    let holds = checks.iter().all(|check| check.finding != "fail");
    if arguments.json {
        print_json(&to_json(claim, holds, &checks));
    } else {
        print(&to_text(claim, holds, &checks, is_coloured(&stdout())));
    }
    if holds { Ok(()) } else { Err(Failure::Judged) }
}

/// As `/livez` and `/readyz`: a line for the verdict and one for each check.
fn to_text(claim: &str, holds: bool, checks: &[HealthCheck], is_coloured: bool) -> String {
    let mut text = format!("{}{claim}\n", if holds { "" } else { "not " });
    for HealthCheck { name, finding, why } in checks {
        let finding = format!("{finding:4}");
        let finding = if is_coloured { painted(&finding, colour(&finding)) } else { finding };
        text += &format!("{finding} {name}: {}\n", escaped(why));
    }
    text
}

fn colour(finding: &str) -> Colour {
    match finding.trim_end() {
        "ok" => Colour::Green,
        "warn" => Colour::Yellow,
        _ => Colour::Red,
    }
}

fn to_json(claim: &str, holds: bool, checks: &[HealthCheck]) -> Value {
    let check =
        |HealthCheck { name, finding, why }: &HealthCheck| json!({"name": name, "verdict": finding, "finding": why});
    json!({ format!("is_{claim}"): holds, "checks": checks.iter().map(check).collect::<Vec<_>>() })
}
