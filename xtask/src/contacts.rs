//! `cargo xtask contacts`: the Contacts sample on Cosmos DB, a relay and a Service Bus, locally.
//!
//! What lives here: building the four programs, what each is told, what the person is told. What
//! does not: starting, watching and ending them (`contacts/running.rs`), and what they do.
//! Invariant: the sample and the relay are the ones that anybody builds, on Cosmos DB by their
//! configuration alone; all that is local are the addresses.

mod running;

use std::ffi::OsStr;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use postrider_servers::cosmos;

use self::running::Running;
use crate::process;
use crate::test::excluded;
use crate::workspace::Workspace;

/// What is built, and with which features.
const BUILD: [&str; 11] = [
    "build",
    "--locked",
    "--bins",
    "-p",
    "postrider-cli",
    "-p",
    "postrider-sample-contacts",
    "-p",
    "postrider-servicebus-emulator",
    "--features",
    "postrider-cli/cosmos,postrider-sample-contacts/cosmos",
];
/// The queue, the container, the database and the topic.
const NAME: &str = "contacts";
/// The queue as the sample's events want it: a session is a contact, and repetitions are dropped.
const BUS: &str = "[queues.contacts]\nrequires_session = true\n\
                   duplicate_detection_window = \"10m\"\n";
/// Receives with Microsoft's own client.
pub(crate) const RECEIVER: &str = "samples/contacts/receive.py";

/// How to run it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where the service listens; port 0 takes a free one.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Run the programs in this folder, built with the feature cosmos, and build nothing.
    #[arg(long, value_name = "FOLDER")]
    built: Option<PathBuf>,
}

/// Builds, starts all of it, and ends it at Ctrl-C or SIGTERM.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let folder = match &args.built {
        Some(folder) => folder.clone(),
        None => build(&Workspace::locate()?)?,
    };
    let mut running = Running::prepare()?;
    match start(&mut running, &folder, args.listen)? {
        Some(started) => started.tell(running.folder())?,
        None => return Ok(ExitCode::SUCCESS),
    }
    running.until_stopped()?;
    eprintln!("stopping: the relay delivers what is under way");
    running.end()?;
    eprintln!("stopped; nothing is left of it");
    Ok(ExitCode::SUCCESS)
}

fn build(workspace: &Workspace) -> Result<PathBuf> {
    eprintln!("building what is not built yet: a first time takes minutes");
    excluded::build(workspace)?;
    let name = "build the service, the relay and the Service Bus";
    let built = process::run(name, workspace.cargo().args(BUILD))?;
    if !built.status.success() {
        bail!("{}\nthe programs could not be built", built.output);
    }
    Ok(workspace.target()?.join("debug"))
}

/// What a person has to know.
struct Started {
    service: String,
    account: String,
    bus: String,
    postrider: PathBuf,
}

/// Starts them in the order in which they need each other; `None` if a signal came first.
fn start(running: &mut Running, built: &Path, listen: SocketAddr) -> Result<Option<Started>> {
    let mut emulator = Command::new(cosmos::program()?);
    emulator.arg("--with-parent");
    let Some(account) = running.start("Cosmos DB", &mut emulator)? else { return Ok(None) };

    let settings = running.folder().join("bus.toml");
    std::fs::write(&settings, BUS).context("write bus.toml")?;
    let mut bus = Command::new(built.join("postrider-servicebus-emulator"));
    bus.args(["--listen", "127.0.0.1:0", "--config"]).arg(settings);
    let Some(bus) = running.start("the Service Bus", &mut bus)? else { return Ok(None) };

    let mut service = Command::new(built.join("contacts"));
    let listen = listen.to_string();
    service.args(["--store", "cosmos", "--listen", listen.as_str(), "--database"]);
    service.arg(running.folder().join("received.db"));
    service.args(["--cosmos-database", NAME, "--cosmos-container", NAME]);
    // Not an argument: everybody may read those.
    service.env("CONTACTS_DATABASE_URL", &account);
    if std::env::var_os("RUST_LOG").is_none() {
        service.env("RUST_LOG", "warn");
    }
    // It has made its containers when it says where it is.
    let Some(said) = running.start("the contacts service", &mut service)? else { return Ok(None) };
    let service = said.split_whitespace().last().unwrap_or_default().to_owned();

    let configuration = running.folder().join("postrider.toml");
    std::fs::write(&configuration, relay(&account, &bus)).context("write postrider.toml")?;
    let postrider = built.join("postrider");
    let mut relay = Command::new(&postrider);
    relay.args([OsStr::new("run"), OsStr::new("--config"), configuration.as_os_str()]);
    running.start_silent("the relay", &mut relay)?;
    Ok(Some(Started { service, account, bus, postrider }))
}

/// The relay's configuration, as a person would write it.
fn relay(account: &str, bus: &str) -> String {
    format!(
        "[source]\nkind = \"cosmos\"\nurl = \"{account}\"\ndatabase = \"{NAME}\"\n\
         container = \"{NAME}\"\ntopic = \"{NAME}\"\n\n[[sink]]\nkind = \"servicebus\"\n\
         connection_string = \"{bus}\"\nentity = \"{NAME}\"\ndedup_window = \"10m\"\n\n\
         [admin]\nlisten = \"127.0.0.1:0\"\n"
    )
}

impl Started {
    fn tell(&self, folder: &Path) -> Result<()> {
        let Self { service, account, bus, postrider } = self;
        let (folder, postrider) = (folder.display(), postrider.display());
        let text = format!(
            "The contacts service keeps contacts and events in Cosmos DB, and Postrider sends the \
             events to a Service Bus.\n\n  \
             page       {service}/\n  \
             API        {service}/docs\n  \
             Cosmos DB  {account}\n  \
             bus        {bus}\n  \
             queue      {NAME} (a session is a contact)\n  \
             relay      {folder}/postrider.toml\n\n\
             Create a contact on the page, or with\n\n  \
             curl -i {service}/api/contacts -H 'content-type: application/json' \\\n    \
             -d '{{\"firstName\":\"Ada\",\"lastName\":\"Lovelace\",\
             \"email\":\"ada@example.com\",\"companyName\":\"Analytical Engines\"}}'\n\n\
             Receive its events with any client of Azure Service Bus; with Microsoft's for Python \
             (azure-servicebus):\n\n  \
             CONNECTION_STRING='{bus}' \\\n    python3 {RECEIVER}\n\n\
             See where the relay stands:\n\n  \
             {postrider} status --config {folder}/postrider.toml\n\n\
             Ctrl-C ends all of it; nothing is kept."
        );
        let mut output = std::io::stdout().lock();
        writeln!(output, "{text}").context("say where everything is")?;
        output.flush().context("say where everything is")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bus_has_the_queue_that_the_relay_sends_to() {
        assert!(BUS.contains(&format!("[queues.{NAME}]")));
        assert!(relay("a", "b").contains(&format!("entity = \"{NAME}\"")));
    }
}
