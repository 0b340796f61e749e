//! The call of probes: what `/livez` and `/readyz` say, over the socket.

use forebay_rpc::proto::{HealthCheck, HealthReply};

use crate::health::{Check, Health};
use crate::state::Shared;

pub fn health(shared: &Shared) -> HealthReply {
    let health = Health::of(&shared.lock());
    let told = |checks: Vec<Check>| checks.into_iter().map(check).collect();
    HealthReply { live: told(health.live()), ready: told(health.ready()) }
}

pub fn check(Check { name, finding, why }: Check) -> HealthCheck {
    HealthCheck { name: name.to_owned(), finding: finding.name().to_owned(), why }
}
