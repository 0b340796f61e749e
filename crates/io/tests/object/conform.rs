//! The suite for tiers.

use std::time::Duration;

use forebay_core::BlockKey;
use forebay_core::tier::Tier;
use forebay_io::conformance::{self, SLOT_BYTES, SLOTS};
use forebay_io::header::{HEADER_BYTES, Sealing};
use forebay_io::object::{Object, ObjectConfig};
use forebay_io::uring::Region;

use crate::bed;
use crate::server::Server;

struct Bed {
    server: Server,
    sealing: Sealing,
    pool: Region,
    tier: Option<Object>,
}

impl Bed {
    fn open(&mut self) {
        self.tier = None;
        let config = ObjectConfig { sealing: self.sealing.clone(), ..bed::config(&self.server.endpoint) };
        self.tier = Some(Object::open(&config, self.pool.clone()).unwrap());
    }
}

impl conformance::Bed for Bed {
    fn tier(&mut self) -> &mut dyn Tier {
        self.tier.as_mut().unwrap()
    }

    fn pool(&self) -> Region {
        self.pool.clone()
    }

    fn turn(&mut self) {
        bed::turn_taken(self.tier.as_ref().unwrap(), Duration::from_millis(1));
    }

    fn reopen(&mut self) {
        self.open();
    }

    fn damage(&mut self, key: &BlockKey, length_bytes: u64) -> bool {
        let name = format!("team/cache/{}/{:04x}-{}", key.namespace, key.group, key.hash);
        let mut objects = self.server.state.objects.lock().unwrap();
        objects.get_mut(&name).unwrap()[HEADER_BYTES + length_bytes as usize / 2] ^= 0x40;
        true
    }
}

#[test]
fn the_tier_conforms_with_a_secret_and_without() {
    for sealing in [Sealing::default(), Sealing::with(&[7; 32]).unwrap()] {
        let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
        let mut bed = Bed { server: Server::start(), sealing, pool, tier: None };
        bed.open();
        conformance::check(&mut bed);
    }
}
