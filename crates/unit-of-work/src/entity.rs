//! Entities: documents that raise events when their methods change them.
//!
//! What lives here: the trait. What does not: its events' list (`pending.rs`) and saving.
//! Invariant: an entity is saved under its id, in its partition, with the events it raised.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::PendingEvents;

/// A document of the application with an identity and a list of events it raised.
///
/// Derive it: `#[derive(Serialize, Deserialize, Entity)]` with `#[entity(type = "contact")]`; mark
/// the field of the id with `#[entity(id)]` and that of the events with `#[entity(pending)]` and
/// `#[serde(skip)]`. Keep all fields private: methods change state and raise events.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an entity",
    label = "not an entity",
    note = "derive it: `#[derive(Serialize, Deserialize, Entity)]` with `#[entity(type = \"…\")]`"
)]
pub trait Entity: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// The document's type, for example `contact`.
    const TYPE: &'static str;
    /// Whether raising an action again replaces the one that is still pending.
    const COALESCE: bool;

    /// Unique within its partition key.
    fn id(&self) -> String;

    /// The logical partition; also the key of its events. The id, unless a field says otherwise.
    fn partition_key(&self) -> String {
        self.id()
    }

    /// The events it raised and that are not saved yet.
    fn pending(&self) -> &PendingEvents<Self>;

    /// The same, to be changed: for the unit of work.
    fn pending_mut(&mut self) -> &mut PendingEvents<Self>;
}
