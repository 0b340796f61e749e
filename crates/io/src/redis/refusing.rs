//! Which servers take no writes at present: of a cluster, some may refuse them while others take them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::config::Mode;
use super::shared::Written;
use crate::refusals::Refusals;

/// By server: what it refuses, and what it said last.
#[derive(Default)]
pub(super) struct Refusing(BTreeMap<Arc<str>, (Refusals, String)>);

impl Refusing {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn hear(&mut self, written: Written, now: Instant) {
        let Written { server, refusal } = written;
        match refusal {
            Some(why) => {
                let (refusals, said) = self.0.entry(server).or_default();
                refusals.refused(now);
                *said = why;
            }
            None => self.0.get_mut(&server).into_iter().for_each(|(refusals, _)| refusals.taken(&server)),
        }
    }

    /// Says which of the servers refuse lastingly, and forgets those that are no longer used.
    pub fn judge(&mut self, servers: &[String], now: Instant) {
        self.0.retain(|server, _| servers.iter().any(|used| **used == **server));
        for (server, (refusals, said)) in &mut self.0 {
            refusals.judge(server, now, || said.clone());
        }
    }

    /// Why writes are refused; in a cluster, by whom.
    pub fn told(&self, mode: &Mode) -> Option<String> {
        let told = self.0.iter().filter_map(|(server, (refusals, _))| Some((server, refusals.told()?)));
        let told: Vec<String> = match mode {
            Mode::Cluster => told.map(|(server, why)| format!("`{server}`: {why}")).collect(),
            _ => told.map(|(_, why)| why).collect(),
        };
        (!told.is_empty()).then(|| told.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_node_that_refuses_is_told_though_others_take_writes_until_it_takes_one_or_leaves() {
        let (mut refusing, start) = (Refusing::default(), Instant::now());
        let [a, b]: [Arc<str>; 2] = ["a:1".into(), "b:1".into()];
        let servers = [a.to_string(), b.to_string()];
        let minute = |refusing: &mut Refusing, refusal: Option<&str>| {
            for second in 0..60 {
                let now = start + Duration::from_secs(second);
                refusing.hear(Written { server: a.clone(), refusal: None }, now);
                refusing.hear(Written { server: b.clone(), refusal: refusal.map(str::to_owned) }, now);
                refusing.judge(&servers, now);
            }
        };
        minute(&mut refusing, Some("OOM"));
        assert_eq!(refusing.told(&Mode::Cluster), Some("`b:1`: OOM".to_owned()));
        assert_eq!(refusing.told(&Mode::Single), Some("OOM".to_owned()));
        minute(&mut refusing, None);
        assert_eq!(refusing.told(&Mode::Cluster), None);
        minute(&mut refusing, Some("OOM"));
        refusing.judge(&servers[..1], start);
        assert_eq!(refusing.told(&Mode::Cluster), None, "it has left the cluster");
    }
}
