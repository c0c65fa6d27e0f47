//! The contacts page in headless Chromium: what a person does there, and what they then see.
//!
//! The tests of the command line drive the demonstration with this file too, so that it names
//! nothing of this crate.

use std::process::Stdio;
use std::time::Duration;

use fantoccini::elements::Element;
use fantoccini::error::CmdError;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// Longest wait for anything that must show.
const DEADLINE: Duration = Duration::from_secs(30);
const ABSENT: &str = "chromedriver cannot be started: install the packages chromium and \
     chromium-driver (apt-get install chromium chromium-driver)";

/// An event as the page shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShownEvent {
    pub(crate) number: String,
    pub(crate) subject: String,
    pub(crate) id: String,
    pub(crate) key: String,
    pub(crate) payload: Value,
}

/// A browser with a profile of its own.
pub(crate) struct Page {
    browser: Client,
    driver: Child,
    _profile: TempDir,
}

impl Page {
    /// Starts a browser and opens `address`.
    pub(crate) async fn open(address: &str) -> Self {
        let profile = TempDir::new().expect("make a folder for the profile");
        let (driver, port) = start_driver().await;
        let flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--window-size=1280,1000",
        ];
        let mut arguments: Vec<String> = flags.map(str::to_owned).to_vec();
        arguments.push(format!("--user-data-dir={}", profile.path().display()));
        let mut wanted = serde_json::Map::new();
        wanted.insert("goog:chromeOptions".to_owned(), json!({ "args": arguments }));
        let browser = ClientBuilder::new(HttpConnector::new())
            .capabilities(wanted)
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .expect("start Chromium (package chromium)");
        let page = Self { browser, driver, _profile: profile };
        page.go_to(address).await;
        page
    }

    pub(crate) async fn go_to(&self, address: &str) {
        self.browser.goto(address).await.expect("open the page");
    }

    /// Ends the browser.
    pub(crate) async fn close(mut self) {
        self.browser.close().await.expect("close the browser");
        self.driver.kill().await.expect("end chromedriver");
    }

    pub(crate) async fn element(&self, test_id: &str) -> Element {
        let selector = format!("[data-testid=\"{test_id}\"]");
        let wait = self.browser.wait().at_most(DEADLINE);
        let found = wait.for_element(Locator::Css(&selector)).await;
        found.unwrap_or_else(|error| panic!("{test_id} does not show: {error}"))
    }

    pub(crate) async fn click(&self, test_id: &str) {
        // A list that is drawn anew in between takes the element away: then it is found again.
        until(&format!("{test_id} can be clicked"), async || {
            let element = self.element(test_id).await;
            match element.click().await {
                Ok(()) => Some(()),
                Err(error) if is_passing(&error) => None,
                Err(error) => panic!("click on {test_id}: {error}"),
            }
        })
        .await;
    }

    pub(crate) async fn text(&self, test_id: &str) -> String {
        self.element(test_id).await.text().await.expect("read a text")
    }

    pub(crate) async fn fill(&self, test_id: &str, text: &str) {
        let field = self.element(test_id).await;
        field.clear().await.expect("clear a field");
        field.send_keys(text).await.expect("type into a field");
    }

    /// Waits until an element shows a text.
    pub(crate) async fn wait_for_text(&self, test_id: &str, expected: &str) {
        until(&format!("{test_id} shows {expected:?}"), async || {
            (self.read(test_id).await.as_deref() == Some(expected)).then_some(())
        })
        .await;
    }

    /// Waits until an element shows a text of some kind.
    pub(crate) async fn wait_for(&self, test_id: &str, fits: impl Fn(&str) -> bool) {
        until(&format!("{test_id} shows what is expected"), async || {
            self.read(test_id).await.is_some_and(|text| fits(&text)).then_some(())
        })
        .await;
    }

    async fn read(&self, test_id: &str) -> Option<String> {
        let script = "const it = document.querySelector(`[data-testid=\"${arguments[0]}\"]`); \
                      return it && it.textContent;";
        let text = self.browser.execute(script, vec![test_id.into()]).await;
        text.expect("run a script").as_str().map(str::to_owned)
    }

    pub(crate) async fn create(&self, first_name: &str, last_name: &str) {
        self.fill("first-name", first_name).await;
        self.fill("last-name", last_name).await;
        self.fill("email", "johndoe@contoso.com").await;
        self.fill("company", "Contoso").await;
        self.fill("description", "This is a contact").await;
        self.click("save").await;
        self.wait_for_text("message", "Created.").await;
        self.wait_for_text("full-name", &format!("{first_name} {last_name}")).await;
    }

    /// Gives the first contact of the list another first name.
    pub(crate) async fn rename(&self, first_name: &str) {
        self.start_editing().await;
        self.fill("first-name", first_name).await;
        self.click("save").await;
        self.wait_for_text("message", "Saved.").await;
        self.wait_for_text("form-title", "New contact").await;
    }

    pub(crate) async fn start_editing(&self) {
        self.click("edit").await;
        self.wait_for_text("form-title", "Edit contact").await;
    }

    /// Deletes the first contact of the list.
    pub(crate) async fn delete(&self) {
        self.click("delete").await;
        self.click("confirm-delete").await;
        self.wait_for_text("message", "Deleted.").await;
    }

    /// The id of the first contact of the list.
    pub(crate) async fn contact_id(&self) -> String {
        until("a contact's id can be read", async || {
            match self.element("contact").await.attr("data-contact-id").await {
                Ok(id) => Some(id.expect("each contact has one")),
                Err(error) if is_passing(&error) => None,
                Err(error) => panic!("read an attribute: {error}"),
            }
        })
        .await
    }

    pub(crate) async fn contact_count(&self) -> usize {
        let found = self.browser.find_all(Locator::Css("[data-testid=\"contact\"]")).await;
        found.expect("look for contacts").len()
    }

    /// Waits for `count` events, and gives all that show, from top to bottom.
    pub(crate) async fn events(&self, count: usize) -> Vec<ShownEvent> {
        let script = r#"
            return [...document.querySelectorAll('[data-testid="event"]')].map((event) => [
                event.dataset.number,
                event.querySelector('[data-testid="event-subject"]').textContent,
                event.dataset.eventId, event.dataset.eventKey,
                event.querySelector('[data-testid="event-payload"]').textContent,
            ]);"#;
        until(&format!("{count} events show"), async || {
            let shown = self.browser.execute(script, Vec::new()).await.expect("run a script");
            let shown: Vec<[String; 5]> = serde_json::from_value(shown).expect("five texts each");
            (shown.len() >= count).then(|| shown.into_iter().map(shown_event).collect())
        })
        .await
    }
}

fn shown_event([number, subject, id, key, payload]: [String; 5]) -> ShownEvent {
    let payload = serde_json::from_str(&payload).expect("the payload shows as JSON");
    ShownEvent { number, subject, id, key, payload }
}

/// Whether an element was drawn anew, or lies under another one for a moment.
fn is_passing(error: &CmdError) -> bool {
    let text = error.to_string();
    ["stale element", "click intercepted", "not interactable", "no such element"]
        .iter()
        .any(|passing| text.contains(passing))
}

async fn start_driver() -> (Child, u16) {
    let mut driver = Command::new("chromedriver")
        .arg("--port=0")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect(ABSENT);
    let output = driver.stdout.take().expect("its output is a pipe");
    let mut lines = BufReader::new(output).lines();
    let port = async {
        loop {
            let line = lines.next_line().await.expect("read a line").expect("it says its port");
            let port = line
                .rsplit_once("successfully on port ")
                .map(|(_, port)| port.trim_end_matches('.'));
            if let Some(port) = port.and_then(|port| port.parse().ok()) {
                return port;
            }
        }
    };
    let port = tokio::time::timeout(DEADLINE, port).await.expect("chromedriver starts");
    (driver, port)
}

/// Asks until there is an answer.
async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let asking = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    };
    let answer = tokio::time::timeout(DEADLINE, asking).await;
    answer.unwrap_or_else(|_| panic!("in vain for {DEADLINE:?}: {what}"))
}
