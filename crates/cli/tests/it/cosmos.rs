//! `kind = "cosmos"`: the binary against Microsoft's own emulator, into the Service Bus stand-in.

use std::collections::{HashMap, HashSet};

use postrider_servers::cosmos::Cosmos;
use postrider_servicebus_emulator::{Config, Emulator, Entity};
use postrider_store_cosmos::azure_data_cosmos::TransactionalBatch;
use postrider_store_cosmos::azure_data_cosmos::clients::ContainerClient;
use postrider_store_cosmos::{CosmosConfig, CosmosStore};
use rustix::process::Signal;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::harness::{Home, eventually};

const KEYS: usize = 12;
/// Batches of each key.
const ROUNDS: usize = 10;
/// Events of each batch.
const EACH: usize = 3;

/// An account and a namespace, on a runtime of their own, since these tests have none.
struct World {
    account: Cosmos,
    container: ContainerClient,
    bus: Emulator,
    runtime: tokio::runtime::Runtime,
    home: Home,
}

impl World {
    fn new(ranges: u32) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let account = Cosmos::start().expect("the emulator starts");
        account.create_container("shop", "orders", ranges).expect("a container");
        account.create_container("shop", "leases", 1).expect("a container");
        let config = CosmosConfig::new(account.connection_string(), "shop", "orders");
        let store = runtime.block_on(CosmosStore::open(&config)).expect("the store opens");
        let container = store.container();
        let entity = Entity { requires_session: true, ..Entity::default() };
        let names = Config::default().with_queue("orders", entity);
        let bus = runtime.block_on(Emulator::start(names)).expect("started");
        Self { account, container, bus, runtime, home: Home::new() }
    }

    fn configure(&self, more: &str) {
        self.home.write(
            "postrider.toml",
            format!(
                "[source]\nkind = \"cosmos\"\nurl = \"{}\"\ndatabase = \"shop\"\n\
                 container = \"orders\"\npoll_interval = \"100ms\"\n{more}\n[relay]\n\
                 lease_ttl = \"2s\"\n\n[[sink]]\nkind = \"servicebus\"\n\
                 connection_string = \"{}\"\nentity = \"orders\"\n\n[admin]\nlisten = \"off\"\n",
                self.account.connection_string(),
                self.bus.connection_string()
            ),
        );
    }

    /// A batch of one key: its entity anew, and some events.
    fn write(&self, key: usize, round: usize) {
        let key = format!("order-{key}");
        let mut batch = TransactionalBatch::new(key.clone());
        let last = (round + 1) * EACH;
        let entity = json!({
            "id": key, "partitionKey": key, "type": "order", "data": { "round": round },
            "ttl": -1, "lastSeq": last,
        });
        batch = batch.upsert_item(entity, None).expect("it is JSON");
        for seq in round * EACH + 1..=last {
            let id = Uuid::new_v4().to_string();
            let event = json!({
                "id": id, "partitionKey": key, "type": "domainEvent",
                "data": { "action": "OrderChanged", "id": id, "n": seq },
                "ttl": 864_000, "seq": seq,
            });
            batch = batch.create_item(event).expect("it is JSON");
        }
        let answer = self.runtime.block_on(async {
            let answer = self.container.execute_transactional_batch(batch, None).await;
            answer.and_then(|answer| answer.into_model())
        });
        let answer = answer.expect("an answer");
        assert!(answer.results().iter().all(|result| result.is_success()));
    }

    /// How many different messages have come.
    fn ids(&self) -> usize {
        let messages = self.bus.entity("orders").messages();
        messages.iter().map(|message| message.message_id.clone()).collect::<HashSet<_>>().len()
    }
}

/// Two relays share the ranges, one is killed, a range is split and the account throttles in the
/// meantime: every event arrives, and the messages of each session, repetitions aside, in order.
#[test]
fn a_kill_a_split_and_throttling_lose_nothing_and_sessions_keep_their_order() {
    let world = World::new(3);
    world.configure("");
    let first = world.home.start(&["run"]);
    let second = world.home.start(&["run"]);
    let rounds = |from: usize, to: usize| {
        for round in from..to {
            (0..KEYS).for_each(|key| world.write(key, round));
        }
    };
    rounds(0, 3);
    eventually("some arrive", || (world.ids() > 0).then_some(()));
    first.signal(Signal::KILL);
    assert_eq!(first.ended(), None);
    rounds(3, 5);
    world.account.split("shop", "orders", 0).expect("split");
    let throttle =
        r#"{"operation": "changeFeed", "count": 5, "answer": {"status": 429, "retryAfterMs": 50}}"#;
    world.account.fault(throttle).expect("a fault");
    let third = world.home.start(&["run"]);
    rounds(5, ROUNDS);
    let all = KEYS * ROUNDS * EACH;
    eventually("all arrive", || (world.ids() == all).then_some(()));
    for relay in [second, third] {
        relay.signal(Signal::TERM);
        assert_eq!(relay.ended(), Some(0));
    }
    let mut last: HashMap<String, u64> = HashMap::new();
    let mut seen = HashSet::new();
    for message in world.bus.entity("orders").messages() {
        if !seen.insert(message.message_id.clone()) {
            continue;
        }
        let data: Value = serde_json::from_slice(&message.body).expect("the event's data");
        assert_eq!(message.subject.as_deref(), Some("OrderChanged"));
        assert_eq!(data["id"].as_str(), message.message_id.as_deref());
        let session = message.session_id.clone().expect("a session");
        let number = data["n"].as_u64().expect("a number");
        let before = last.insert(session.clone(), number).unwrap_or(0);
        assert_eq!(number, before + 1, "{session}");
    }
    assert_eq!(seen.len(), all);
    let status = world.home.postrider(&["status", "--json"]).expect(0).json();
    assert_eq!(status["consumers"][0]["pending"], json!(0), "{status}");
    // People read numbers, programs the whole place.
    let place = status["partitions"][0]["head"].as_str().expect("a place");
    assert!(place.starts_with("0x") && place.len() > 200, "{place}");
    for command in
        [&["status"][..], &["consumers", "list"], &["tail", "--no-follow", "--from", "oldest"]]
    {
        let told = world.home.postrider(command);
        assert!(told.out.contains("lsn "), "{}", told.out);
        assert!(told.out.lines().all(|line| line.len() < 250), "{}", told.out);
    }
}

/// What the libraries of Azure tell of themselves is no news of a relay's, unless it is asked for.
#[test]
fn the_log_is_the_relays_own() {
    let world = World::new(1);
    world.configure("");
    let lines = |level: &str| {
        world.configure(&format!("[log]\nformat = \"json\"\nlevel = \"{level}\"\n"));
        let relay = world.home.start(&["run"]);
        relay.line_with("lease acquired");
        relay.signal(Signal::TERM);
        let told = eventually("it ends", || {
            let seen = relay.seen();
            seen.contains("stopped").then_some(seen)
        });
        assert_eq!(relay.ended(), Some(0));
        told
    };
    let own = lines("info");
    assert!(own.contains("\"target\":\"postrider"), "{own}");
    assert!(!own.contains("\"target\":\"azure"), "{own}");
    let all = lines("info,azure=info");
    assert!(all.contains("\"target\":\"azure"), "{all}");
}

/// Three relays have four of twelve ranges each, and two have six once the third is dead.
#[test]
fn relays_share_the_ranges_evenly() {
    let world = World::new(12);
    world.configure("");
    let shares = || {
        let status = world.home.postrider(&["status", "--json"]).expect(0).json();
        let mut shares: HashMap<String, usize> = HashMap::new();
        for partition in status["partitions"].as_array().expect("a list") {
            if let Some(holder) = partition["lease"]["holder"].as_str() {
                *shares.entry(holder.to_owned()).or_default() += 1;
            }
        }
        let mut shares: Vec<usize> = shares.into_values().collect();
        shares.sort_unstable();
        shares
    };
    let relays: Vec<_> = (0..3).map(|_| world.home.start(&["run"])).collect();
    eventually("four each", || (shares() == [4, 4, 4]).then_some(()));
    relays[1].signal(Signal::KILL);
    eventually("six each", || (shares() == [6, 6]).then_some(()));
    world.write(0, 0);
    eventually("it arrives", || (world.ids() == EACH).then_some(()));
}

/// What waits longer than a quarter of its time to live is told before it is deleted.
#[test]
fn unsent_events_that_may_expire_are_told() {
    let world = World::new(1);
    world.configure("event_ttl = \"4s\"\n");
    let relay = world.home.start(&["run"]);
    world.write(0, 0);
    eventually("it arrives", || (world.ids() == EACH).then_some(()));
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
    world.write(0, 1);
    eventually("it is told", || {
        let done = world.home.postrider(&["status"]);
        done.out.contains("expire unsent").then_some(())
    });
}

#[test]
fn settings_are_told_at_the_key_that_they_name() {
    let home = Home::new();
    let refused = |more: &str, part: &str| {
        home.write(
            "postrider.toml",
            format!(
                "[source]\nkind = \"cosmos\"\n{more}\n\n[[sink]]\nkind = \"jsonl\"\npath = \"-\"\n"
            ),
        );
        home.postrider(&["config", "check"]).expect(2).err_has(&[part]);
    };
    let named = "database = \"a\"\ncontainer = \"b\"\n";
    refused("database = \"a\"", "source.url: is missing");
    refused(&format!("{named}url = \"http://example.com\"\nkey = \"eA==\""), "source.url");
    refused(&format!("{named}url = \"https://example.com\""), "source.key: is missing");
    let https = format!("{named}url = \"https://example.com\"\nkey = \"eA==\"\n");
    refused(&format!("{https}lease_container = \"b\""), "source.lease_container");
    refused(&format!("{https}max_items = 101"), "source.max_items");
    refused(&format!("{https}event_ttl = \"10ms\""), "source.event_ttl");
}
