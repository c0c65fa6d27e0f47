//! Signing in by Microsoft Entra ID, as far as it can be run here.
//!
//! What lives here: an application with its secret at a token endpoint of this test, over HTTPS,
//! and the token's way to the emulator. What does not: Entra ID itself, which nobody has asked, and
//! the other credentials, which need Azure around them.
//! Invariant: no secret and no token is in an error.

use std::path::Path;
use std::sync::{Arc, Mutex};

use postrider_core::{ErrorKind, Secret, Sink};
use postrider_sink_servicebus::{Auth, EntraCredential, ServiceBus, ServiceBusConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::tls::{acceptor, certificates};
use crate::{Bus, Wall, confirm, confirm_in_the_end, fail, record};

const TOKEN: &str = "eyJhbGciOiJub25lIn0.eyJyb2xlIjoic2VuZGVyIn0.c2lnbmF0dXJl";

/// A token endpoint: what it answers, and what it was asked.
struct Endpoint {
    port: u16,
    answer: Arc<Mutex<(u16, String)>>,
    asked: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

impl Endpoint {
    async fn start(folder: &Path) -> Self {
        let acceptor = acceptor(folder);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let answer = Arc::new(Mutex::new((200, String::new())));
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let (answers, asks) = (answer.clone(), asked.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(mut tls) = acceptor.accept(stream).await else { continue };
                let Some(request) = request(&mut tls).await else { continue };
                asks.lock().expect("not poisoned").push(request);
                let (code, body) = answers.lock().expect("not poisoned").clone();
                let length = body.len();
                let text = format!(
                    "HTTP/1.1 {code} X\r\nContent-Type: application/json\r\n\
                     Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
                );
                let _ = tls.write_all(text.as_bytes()).await;
                let _ = tls.shutdown().await;
            }
        });
        let endpoint = Self { port, answer, asked, _tasks: tasks };
        endpoint.gives_tokens();
        endpoint
    }

    fn answers(&self, code: u16, body: String) {
        *self.answer.lock().expect("not poisoned") = (code, body);
    }

    fn gives_tokens(&self) {
        let body = format!(
            "{{\"token_type\":\"Bearer\",\"expires_in\":3599,\"ext_expires_in\":3599,\
             \"access_token\":\"{TOKEN}\"}}"
        );
        self.answers(200, body);
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().expect("not poisoned").clone()
    }
}

/// Head and body of one request.
async fn request(stream: &mut (impl AsyncRead + Unpin)) -> Option<String> {
    let mut text = String::new();
    let mut buffer = [0; 4096];
    loop {
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| {
                let (name, value) = line.split_once(": ")?;
                name.eq_ignore_ascii_case("content-length").then(|| value.parse().ok())?
            });
            if body.len() >= length.unwrap_or(0) {
                return Some(text);
            }
        }
        let read = stream.read(&mut buffer).await.ok().filter(|read| *read > 0)?;
        text.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
}

fn application(bus: &Bus, endpoint: &Endpoint, folder: &Path) -> ServiceBusConfig {
    let text = format!("Endpoint=sb://127.0.0.1:{};UseDevelopmentEmulator=true", bus.tap.port());
    ServiceBusConfig {
        connection_string: Secret::new(text),
        auth: Auth::Entra,
        credential: Some(EntraCredential::ClientSecret),
        tenant_id: Some("72f988bf-0000-0000-0000-2d7cd011db47".into()),
        client_id: Some("an-application".into()),
        client_secret: Some(Secret::new("hunter2")),
        authority: Some(format!("https://localhost:{}", endpoint.port)),
        ca_file: Some(folder.join("ca.pem")),
        ..bus.config()
    }
}

fn sink(config: &ServiceBusConfig) -> ServiceBus {
    ServiceBus::new(config, Arc::new(Wall)).expect("valid settings")
}

#[tokio::test]
async fn an_application_signs_in_with_its_secret_and_sends_with_the_token() {
    let folder = tempfile::tempdir().expect("a folder");
    certificates(folder.path());
    let (bus, endpoint) = (Bus::start().await, Endpoint::start(folder.path()).await);
    let sink = sink(&application(&bus, &endpoint, folder.path()));
    confirm(&sink, &[record(1, "k", b"{}")]).await;
    assert_eq!(bus.stored().len(), 1);
    let asked = endpoint.asked();
    let [request] = &asked[..] else { panic!("once: {asked:?}") };
    for part in [
        "POST /72f988bf-0000-0000-0000-2d7cd011db47/oauth2/v2.0/token HTTP/1.1",
        "client_id=an-application",
        "client_secret=hunter2",
        "grant_type=client_credentials",
        "scope=https%3A%2F%2Fservicebus.azure.net%2F.default",
    ] {
        assert!(request.contains(part), "{part}: {request}");
    }
    assert!(bus.tap.token_has(TOKEN.as_bytes()), "it is handed over");
    // `type`, then its value as a short string: a JWT, and no shared access signature.
    assert!(bus.tap.token_has(b"type\xa1\x03jwt"), "as what it is");
}

#[tokio::test]
async fn a_secret_that_is_refused_holds_everything_back_until_there_is_another() {
    let folder = tempfile::tempdir().expect("a folder");
    certificates(folder.path());
    let (bus, endpoint) = (Bus::start().await, Endpoint::start(folder.path()).await);
    let sink = sink(&application(&bus, &endpoint, folder.path()));
    let body = "{\"error\":\"invalid_client\",\"error_codes\":[7000222],\"error_description\":\
                \"AADSTS7000222: The provided client secret keys are expired.\"}";
    endpoint.answers(401, body.into());
    let error = fail(&sink, record(1, "k", b"{}")).await;
    assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
    assert!(error.to_string().contains("AADSTS7000222"), "{error}");
    assert!(!format!("{error:?} {}", error.chain()).contains("hunter2"), "{error:?}");
    let error = sink.check().await.expect_err("no better");
    assert!(error.to_string().contains("secret keys are expired"), "{error}");
    endpoint.gives_tokens();
    confirm_in_the_end(&sink, record(1, "k", b"{}")).await;
    assert_eq!(bus.stored().len(), 1);
}

#[tokio::test]
async fn an_endpoint_that_asks_to_wait_is_waited_for() {
    let folder = tempfile::tempdir().expect("a folder");
    certificates(folder.path());
    let (bus, endpoint) = (Bus::start().await, Endpoint::start(folder.path()).await);
    let sink = sink(&application(&bus, &endpoint, folder.path()));
    for code in [429, 503] {
        endpoint.answers(code, "{\"error_description\":\"AADSTS90055: throttled\"}".into());
        let error = fail(&sink, record(1, "k", b"{}")).await;
        assert!(matches!(error.kind(), ErrorKind::Throttled { .. }), "{code}: {error:?}");
    }
    assert_eq!(endpoint.asked().len(), 2, "the relay is who tries again");
    endpoint.gives_tokens();
    confirm_in_the_end(&sink, record(1, "k", b"{}")).await;
}

#[tokio::test]
async fn nobody_else_is_believed_to_be_the_endpoint() {
    let (folder, other) =
        (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    certificates(folder.path());
    certificates(other.path());
    let (bus, endpoint) = (Bus::start().await, Endpoint::start(folder.path()).await);
    let sink = sink(&application(&bus, &endpoint, other.path()));
    let error = fail(&sink, record(1, "k", b"{}")).await;
    assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
    assert!(endpoint.asked().is_empty(), "the secret was told to nobody");
}

#[test]
fn settings_that_cannot_be_are_told_by_key() {
    let config = ServiceBusConfig {
        auth: Auth::Entra,
        namespace: Some("shop.servicebus.windows.net".into()),
        entity: Some("orders".into()),
        credential: Some(EntraCredential::ClientSecret),
        tenant_id: Some("no tenant".into()),
        client_id: Some("an-application".into()),
        client_secret: Some(Secret::new("hunter2")),
        ..ServiceBusConfig::new(Secret::new(""))
    };
    let error = ServiceBus::new(&config, Arc::new(Wall)).expect_err("no tenant's id");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().starts_with("credential: "), "{error}");
    assert!(!error.chain().contains("hunter2"), "{error}");
}
