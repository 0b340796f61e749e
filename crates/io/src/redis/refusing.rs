//! Which servers refuse writes or reads at present: of a cluster, some may refuse them while others do not.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use super::config::Mode;
use super::in_flight::Verb;
use super::shared::Said;
use crate::refusals::{Refusals, Refused, joined};

/// By server and kind of operation: what it refuses, and what it said last. It may answer probes and refuse loads.
#[derive(Default)]
pub(super) struct Refusing(BTreeMap<(Arc<str>, Verb), (Refusals, String)>);

impl Refusing {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn hear(&mut self, said: Said, now: Instant) {
        let Said { server, verb, refusal } = said;
        match refusal {
            Some(why) => {
                let new = || (Refusals::of(refused(verb), hint(refused(verb))), String::new());
                let (refusals, said) = self.0.entry((server, verb)).or_insert_with(new);
                refusals.refused(now);
                *said = why;
            }
            None => {
                let known = self.0.get_mut(&(server.clone(), verb));
                known.into_iter().for_each(|(refusals, _)| refusals.taken(&server, now));
            }
        }
    }

    /// Whether some reads were refused lately.
    pub fn has_refused_reads(&self) -> bool {
        self.0.iter().any(|((_, verb), (refusals, _))| refused(*verb) == Refused::Reads && refusals.are_pending())
    }

    /// Says which of the servers refuse lastingly, and forgets those that are no longer used.
    pub fn judge(&mut self, servers: &[String], now: Instant) {
        self.0.retain(|(server, _), _| servers.iter().any(|used| **used == **server));
        for ((server, _), (refusals, said)) in &mut self.0 {
            refusals.judge(server, now, || said.clone());
        }
    }

    /// What to do about what is refused.
    pub fn hint(&self) -> Option<String> {
        let hint_of = |what| {
            let mut told = self.0.iter().filter(|((_, verb), _)| refused(*verb) == what);
            told.find_map(|(_, (refusals, _))| refusals.hint())
        };
        joined([hint_of(Refused::Reads), hint_of(Refused::Writes)])
    }

    /// Why reads or writes are refused; in a cluster, by whom.
    pub fn told(&self, what: Refused, mode: &Mode) -> Option<String> {
        let of_these = self.0.iter().filter(|((_, verb), _)| refused(*verb) == what);
        let told = of_these.filter_map(|((server, _), (refusals, _))| Some((server, refusals.told()?)));
        let told: BTreeSet<String> = match mode {
            Mode::Cluster => told.map(|(server, why)| format!("`{server}`: {why}")).collect(),
            _ => told.map(|(_, why)| why).collect(),
        };
        (!told.is_empty()).then(|| told.into_iter().collect::<Vec<_>>().join("; "))
    }
}

fn hint(what: Refused) -> &'static str {
    match what {
        Refused::Writes => {
            "make room (`maxmemory`), let the daemon write there (its user needs SET and UNLINK), or end what keeps \
             writes waiting (`CLIENT UNPAUSE`, a failover)"
        }
        Refused::Reads => {
            "let the daemon read there: its user needs GET and EXISTS on all names that begin with \
             `tier.redis.key_prefix`"
        }
    }
}

fn refused(verb: Verb) -> Refused {
    match verb {
        Verb::Write => Refused::Writes,
        Verb::Probe | Verb::Load | Verb::Touch => Refused::Reads,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_node_that_refuses_is_told_though_others_take_writes_until_it_takes_them_or_leaves() {
        let (mut refusing, start) = (Refusing::default(), Instant::now());
        let [a, b]: [Arc<str>; 2] = ["a:1".into(), "b:1".into()];
        let servers = [a.to_string(), b.to_string()];
        let verb = Verb::Write;
        let mut now = start;
        let mut minute = |refusing: &mut Refusing, refusal: Option<&str>| {
            for _ in 0..60 {
                now += Duration::from_secs(1);
                refusing.hear(Said { server: a.clone(), verb, refusal: None }, now);
                refusing.hear(Said { server: b.clone(), verb, refusal: refusal.map(str::to_owned) }, now);
                refusing.judge(&servers, now);
            }
        };
        let told = |refusing: &Refusing, mode| refusing.told(Refused::Writes, &mode);
        minute(&mut refusing, Some("OOM"));
        assert_eq!(told(&refusing, Mode::Cluster), Some("`b:1`: OOM".to_owned()));
        assert_eq!(told(&refusing, Mode::Single), Some("OOM".to_owned()));
        assert_eq!(refusing.told(Refused::Reads, &Mode::Single), None);
        minute(&mut refusing, None);
        assert_eq!(told(&refusing, Mode::Cluster), None);
        minute(&mut refusing, Some("OOM"));
        refusing.judge(&servers[..1], start);
        assert_eq!(told(&refusing, Mode::Cluster), None, "it has left the cluster");
    }

    #[test]
    fn loads_that_are_refused_are_told_though_probes_are_answered() {
        let (mut refusing, start, server) = (Refusing::default(), Instant::now(), Arc::<str>::from("a:1"));
        let mut said = |second, verb, refusal: Option<&str>| {
            let now = start + Duration::from_secs(second);
            refusing.hear(Said { server: server.clone(), verb, refusal: refusal.map(str::to_owned) }, now);
            refusing.judge(&[server.to_string()], now);
            (refusing.told(Refused::Reads, &Mode::Single), refusing.has_refused_reads())
        };
        for second in 0..60 {
            said(second, Verb::Probe, None);
            said(second, Verb::Load, Some("NOPERM"));
        }
        assert_eq!(said(60, Verb::Probe, None), (Some("NOPERM".to_owned()), true));
        assert_eq!(said(61, Verb::Load, None), (Some("NOPERM".to_owned()), true), "a moment ago it refused");
        assert_eq!(said(64, Verb::Load, None), (None, false));
    }
}
