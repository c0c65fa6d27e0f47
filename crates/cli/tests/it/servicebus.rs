//! `kind = "servicebus"`: the binary against the emulator.

use std::time::Duration;

use postrider_core::{ContentType, EventType, Key, NewEvent, Topic};
use postrider_servicebus_emulator::{Config, Emulator, Entity};
use postrider_store_sqlite::rusqlite::{Connection, TransactionBehavior};
use rustix::process::Signal;

use crate::harness::{Home, eventually};

const KEYS: usize = 1_000;

/// The emulator on a runtime of its own, since these tests have none.
struct Bus {
    emulator: Emulator,
    runtime: tokio::runtime::Runtime,
}

impl Bus {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let entity = Entity { requires_session: true, ..Entity::default() };
        let config = Config::default().with_queue("orders", entity);
        let emulator = runtime.block_on(Emulator::start(config)).expect("started");
        Self { emulator, runtime }
    }

    fn configure(&self, home: &Home) {
        home.write(
            "postrider.toml",
            format!(
                "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\n\
                 kind = \"servicebus\"\nconnection_string = \"{}\"\nentity = \"orders\"\n\
                 dedup_window = \"10m\"\n\n[admin]\nlisten = \"off\"\n",
                self.emulator.connection_string()
            ),
        );
    }
}

fn event(key: &str, event_type: &str, bytes: usize) -> NewEvent {
    NewEvent::builder(
        Key::new(key).expect("valid"),
        Topic::new("orders").expect("valid"),
        EventType::new(event_type).expect("valid"),
    )
    .payload(ContentType::new("application/json").expect("valid"), vec![b' '; bytes])
    .build()
    .expect("valid")
}

fn append(home: &Home, events: &[NewEvent]) {
    let mut connection = Connection::open(home.path("app.db")).expect("opened");
    connection.busy_timeout(Duration::from_secs(30)).expect("set");
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("begun");
    postrider_store_sqlite::append(&tx, events).expect("appended");
    tx.commit().expect("committed");
}

/// Where one message that does not fit holds up its whole range for ever, here one key waits.
#[test]
fn an_oversize_event_among_a_thousand_keys_is_parked_with_the_limit_and_all_others_flow() {
    let bus = Bus::start();
    let home = Home::with_outbox();
    bus.configure(&home);
    let mut events: Vec<NewEvent> =
        (0..KEYS).map(|n| event(&format!("k{n}"), "Before", 20)).collect();
    events.push(event("k500", "Large", 300 * 1024));
    events.extend((0..KEYS).map(|n| event(&format!("k{n}"), "After", 20)));
    events.push(event(&"x".repeat(129), "Long", 20));
    append(&home, &events);
    let relay = home.start(&["run"]);
    // All but the large event, the one behind it, and the one of the long key.
    eventually("everything else arrives", || {
        (bus.emulator.entity("orders").counts().messages >= 2 * KEYS as u64 - 1).then_some(())
    });
    let letters = eventually("they are parked", || {
        let letters = home.postrider(&["dead-letters", "list", "--json"]).expect(0).out;
        let lines: Vec<serde_json::Value> =
            letters.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
        (lines.len() >= 3).then_some(lines)
    });
    let text = serde_json::to_string(&letters).expect("JSON");
    assert!(text.contains("262144") || text.contains("261632"), "the limit: {text}");
    assert!(text.contains("129 characters"), "{text}");
    let stored = bus.emulator.entity("orders").messages();
    assert_eq!(stored.len(), 2 * KEYS - 1);
    let of = |key: &str| {
        let mine = stored.iter().filter(|one| one.session_id.as_deref() == Some(key));
        mine.filter_map(|one| one.subject.clone()).collect::<Vec<String>>()
    };
    assert_eq!(of("k500"), ["Before"]);
    assert!((0..KEYS).filter(|n| *n != 500).all(|n| of(&format!("k{n}")) == ["Before", "After"]));
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
    bus.runtime.block_on(bus.emulator.stop());
}

#[test]
fn settings_are_told_at_the_key_that_they_name() {
    let home = Home::new();
    let refused = |more: &str, part: &str| {
        home.write(
            "postrider.toml",
            format!(
                "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\n\
                 kind = \"servicebus\"\n{more}\n"
            ),
        );
        home.postrider(&["config", "check"]).expect(2).err_has(&[part]);
    };
    refused("entity = \"q\"", "sink[0].connection_string: is missing");
    refused(
        "connection_string = \"SharedAccessKeyName=a;SharedAccessKey=hunter2\"\nentity = \"q\"",
        "sink[0].connection_string: Endpoint is missing",
    );
    refused(
        "connection_string = \"Endpoint=sb://h;SharedAccessKeyName=a;SharedAccessKey=b\"",
        "sink[0].entity: ",
    );
    let namespace = "auth = \"entra\"\nnamespace = \"h\"\nentity = \"q\"";
    refused(namespace, "sink[0].credential: is missing");
    let application = format!("{namespace}\ncredential = \"client-secret\"");
    refused(&application, "sink[0].tenant_id: is missing");
    let key = "connection_string = \"Endpoint=sb://h;SharedAccessKeyName=a;SharedAccessKey=b\"";
    refused(&format!("{key}\nentity = \"q\"\nclient_id = \"a\""), "sink[0].client_id");
    if cfg!(not(feature = "entra")) {
        let whole = format!("{namespace}\ncredential = \"azure-cli\"");
        refused(&whole, "sink[0].auth: this build can't sign in by Microsoft Entra ID");
    }
    refused(
        "connection_string = \"Endpoint=sb://h\"\nentity = \"q\"\ndedup_window = \"8d\"",
        "sink[0].dedup_window",
    );
}
