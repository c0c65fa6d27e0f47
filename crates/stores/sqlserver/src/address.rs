//! Where the server is and who asks: from a connection string in ADO.NET's form.
//!
//! What lives here: reading the text, its defaults, and refusing what can't work. What does not:
//! connecting.
//! Invariant: no error repeats any part of the text but known words and the server's name, for a
//! password that was not quoted may stand anywhere in it; TLS is asked for unless the text says no.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use postrider_core::{Error, Result, Secret};

const PORT: u16 = 1433;
/// Sizes of a packet that the protocol allows, in bytes.
const PACKET_BYTES: std::ops::RangeInclusive<u32> = 512..=32_767;

const KNOWN: &str = "Server, Database, User ID, Password, Encrypt, TrustServerCertificate, \
    HostNameInCertificate, Connect Timeout, Command Timeout, Application Name, Workstation ID, \
    Packet Size";

/// Words that other clients know and that change nothing here.
const WITHOUT_EFFECT: &[&str] = &[
    "asynchronousprocessing",
    "connectionlifetime",
    "connectionreset",
    "connectretrycount",
    "connectretryinterval",
    "enlist",
    "ipaddresspreference",
    "loadbalancetimeout",
    "maxpoolsize",
    "minpoolsize",
    "multipleactiveresultsets",
    "multisubnetfailover",
    "persistsecurityinfo",
    "poolblockingperiod",
    "pooling",
    "replication",
    "transactionbinding",
    "transparentnetworkipresolution",
    "typesystemversion",
];

/// How much of a connection is encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encryption {
    /// All of it, or no connection.
    All,
    /// The login alone.
    Login,
    /// Nothing: on the own machine alone.
    Nothing,
}

/// All that the text says.
#[derive(Debug, Clone)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) database: Option<String>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Secret>,
    pub(crate) encryption: Encryption,
    /// Whether any certificate is believed.
    pub(crate) any_certificate: bool,
    pub(crate) name_in_certificate: Option<String>,
    pub(crate) authority: Option<PathBuf>,
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) command_timeout: Option<Duration>,
    pub(crate) application: String,
    pub(crate) workstation: Option<String>,
    pub(crate) packet_bytes: Option<u32>,
}

impl Address {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        if text.contains("://") && !text.contains(';') {
            return Err(Error::permanent(
                "url: not a connection string; write Server=host,1433;Database=name;User ID=…;\
                 Password=…",
            ));
        }
        let mut address = Self {
            host: String::new(),
            port: PORT,
            database: None,
            user: None,
            password: None,
            encryption: Encryption::All,
            any_certificate: false,
            name_in_certificate: None,
            authority: None,
            connect_timeout: None,
            command_timeout: None,
            application: "postrider".to_owned(),
            workstation: None,
            packet_bytes: None,
        };
        for (key, value) in pairs(text)? {
            address.take(&key, value)?;
        }
        address.finish()
    }

    /// `host:port`, for texts.
    pub(crate) fn name(&self) -> String {
        place_name(&self.host, self.port)
    }

    /// `key` is in lower case and without spaces.
    fn take(&mut self, key: &str, value: String) -> Result<()> {
        match key {
            "server" | "datasource" | "address" | "addr" | "networkaddress" => {
                (self.host, self.port) = server(&value)?;
            }
            "database" | "initialcatalog" => self.database = Some(value),
            "userid" | "uid" | "user" | "username" => self.user = Some(value),
            "password" | "pwd" => self.password = Some(Secret::new(value)),
            "encrypt" => self.encryption = encryption(&value)?,
            "trustservercertificate" => {
                self.any_certificate = truth("TrustServerCertificate", &value)?;
            }
            "hostnameincertificate" => self.name_in_certificate = Some(value),
            "servercertificate" | "trustservercertificateca" => {
                self.authority = Some(value.into());
            }
            "connecttimeout" | "connectiontimeout" | "timeout" => {
                self.connect_timeout = seconds("Connect Timeout", &value)?;
            }
            "commandtimeout" => self.command_timeout = seconds("Command Timeout", &value)?,
            "applicationname" | "app" => self.application = value,
            "workstationid" | "wsid" => self.workstation = Some(value),
            "packetsize" => {
                let bytes = value.parse().ok().filter(|bytes| PACKET_BYTES.contains(bytes));
                let wanted = || wrong("Packet Size", "512 to 32767 bytes");
                self.packet_bytes = Some(bytes.ok_or_else(wanted)?);
            }
            _ => refuse(key, &value)?,
        }
        Ok(())
    }

    fn finish(self) -> Result<Self> {
        if self.host.is_empty() {
            return Err(Error::permanent(
                "url: name the server: Server=host,1433;Database=name;User ID=…;Password=…",
            ));
        }
        if self.any_certificate && self.authority.is_some() {
            return Err(Error::permanent(
                "url: TrustServerCertificate believes any certificate, so that an authority says \
                 nothing; leave one of them out",
            ));
        }
        if self.encryption == Encryption::Nothing && !is_loopback(&self.host) {
            return Err(Error::permanent(
                "url: Encrypt=DANGER_PLAINTEXT sends the password as it is, and is for a server on \
                 this machine alone; write Encrypt=true",
            ));
        }
        Ok(self)
    }
}

/// A host and its port as texts show them.
pub(crate) fn place_name(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

/// What is known and can't be done, with the remedy; and what is not known.
fn refuse(key: &str, value: &str) -> Result<()> {
    if WITHOUT_EFFECT.contains(&key) {
        return Ok(());
    }
    let text = match key {
        "integratedsecurity" | "trustedconnection" if truth("", value).is_ok_and(|on| !on) => {
            return Ok(());
        }
        "integratedsecurity" | "trustedconnection" => {
            "url: Integrated Security needs Windows or Kerberos, which is not supported; give a \
             SQL login by User ID and Password, or auth = \"entra\""
        }
        "authentication" if value.eq_ignore_ascii_case("Sql Password") => return Ok(()),
        "authentication" => {
            "url: Authentication is told by the keys auth and credential, not by the connection \
             string; leave it out"
        }
        "applicationintent" if value.eq_ignore_ascii_case("ReadWrite") => return Ok(()),
        "applicationintent" => {
            "url: ApplicationIntent=ReadOnly leads to a copy that takes no writes; leave it out"
        }
        "failoverpartner" => {
            "url: Failover Partner (database mirroring) is not supported; name a listener"
        }
        _ => {
            return Err(Error::permanent(format!(
                "url: a word is unknown (known are {KNOWN}); put a value that has ; or = in it \
                 between ' and '"
            )));
        }
    };
    Err(Error::permanent(text))
}

/// `[tcp:]host[,port]`.
fn server(value: &str) -> Result<(String, u16)> {
    let lower = value.to_ascii_lowercase();
    if lower.starts_with("np:") || lower.starts_with("lpc:") || lower.starts_with("(localdb)") {
        return Err(wrong("Server", "a host that listens for TCP: host,1433"));
    }
    let rest = if lower.starts_with("tcp:") { &value[4..] } else { value };
    let (host, port) = match rest.rsplit_once(',') {
        Some((host, port)) => {
            let number = port.trim().parse().ok().filter(|port: &u16| *port > 0);
            (host, Some(number.ok_or_else(|| wrong("Server", "host,port, as in db.local,1433"))?))
        }
        None => (rest, None),
    };
    let (host, instance) = host.split_once('\\').unwrap_or((host, ""));
    if !instance.is_empty() && port.is_none() {
        return Err(wrong(
            "Server",
            "the instance's own port (host,port): nobody is asked for it by name",
        ));
    }
    let host = host.trim().trim_start_matches('[').trim_end_matches(']');
    let host = match host {
        "." | "(local)" => "localhost",
        _ => host,
    };
    Ok((host.to_owned(), port.unwrap_or(PORT)))
}

fn encryption(value: &str) -> Result<Encryption> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "yes" | "mandatory" => Ok(Encryption::All),
        "false" | "no" | "optional" => Ok(Encryption::Login),
        "strict" => Err(wrong("Encrypt", "true: TLS before the first byte is not supported")),
        _ if value == "DANGER_PLAINTEXT" => Ok(Encryption::Nothing),
        _ => Err(wrong("Encrypt", "true or false")),
    }
}

fn truth(word: &str, value: &str) -> Result<bool> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "yes" | "sspi" => Ok(true),
        "false" | "no" => Ok(false),
        _ => Err(wrong(word, "true or false")),
    }
}

/// Zero means without end, as elsewhere; there is a limit of the store's own then.
fn seconds(word: &str, value: &str) -> Result<Option<Duration>> {
    let seconds: u32 = value.parse().map_err(|_| wrong(word, "whole seconds"))?;
    Ok((seconds > 0).then(|| Duration::from_secs(seconds.into())))
}

fn wrong(word: &str, wanted: &str) -> Error {
    Error::permanent(format!("url: {word}: give {wanted}"))
}

pub(crate) fn is_loopback(host: &str) -> bool {
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    name == "localhost"
        || name.ends_with(".localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The text's words, keys in lower case and without spaces, in their order.
fn pairs(text: &str) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix(';') {
            rest = after.trim_start();
            continue;
        }
        let Some((key, after)) = rest.split_once('=') else {
            return Err(Error::permanent(
                "url: a word has no =; put a value that has ; in it between ' and '",
            ));
        };
        let key = key.chars().filter(|c| !c.is_whitespace()).collect::<String>();
        let (value, after) = value(after.trim_start())?;
        found.push((key.to_lowercase(), value));
        rest = after.trim_start();
    }
    Ok(found)
}

/// A value and what follows it. Between quotation marks everything counts; the mark itself is
/// written twice.
fn value(text: &str) -> Result<(String, &str)> {
    let mark = text.chars().next().filter(|c| matches!(c, '\'' | '"'));
    let Some(mark) = mark else {
        let (value, after) = text.split_once(';').unwrap_or((text, ""));
        return Ok((value.trim_end().to_owned(), after));
    };
    let mut value = String::new();
    let mut rest = &text[1..];
    loop {
        let Some((part, after)) = rest.split_once(mark) else {
            return Err(Error::permanent(
                "url: a value begins with a quotation mark and does not end with one",
            ));
        };
        value.push_str(part);
        if let Some(after) = after.strip_prefix(mark) {
            value.push(mark);
            rest = after;
            continue;
        }
        let after = after.trim_start();
        if !after.is_empty() && !after.starts_with(';') {
            return Err(Error::permanent(
                "url: something follows a value's closing quotation mark; write the mark twice \
                 inside the value",
            ));
        }
        return Ok((value, after));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        match Address::parse(text) {
            Err(error) => error.to_string(),
            Ok(address) => panic!("{text} was taken as {address:?}"),
        }
    }

    #[test]
    fn the_portals_own_string_is_read() {
        let text = "Server=tcp:shop.database.windows.net,1433;Initial Catalog=Shop;Persist \
            Security Info=False;User ID=relay;Password={p};MultipleActiveResultSets=False;\
            Encrypt=True;TrustServerCertificate=False;Connection Timeout=30;";
        let address = Address::parse(text).expect("well formed");
        assert_eq!(address.name(), "shop.database.windows.net:1433");
        assert_eq!(address.database.as_deref(), Some("Shop"));
        assert_eq!(address.user.as_deref(), Some("relay"));
        assert_eq!(address.password.as_ref().map(Secret::expose), Some("{p}"));
        assert_eq!(address.encryption, Encryption::All);
        assert!(!address.any_certificate);
        assert_eq!(address.connect_timeout, Some(Duration::from_secs(30)));
    }

    #[test]
    fn values_between_quotation_marks_may_hold_anything() {
        let text = "server=db ; password = 'a;b=''c\"d é' ;uid=\"o\"\"x\";;database=D";
        let address = Address::parse(text).expect("well formed");
        assert_eq!(address.password.as_ref().map(Secret::expose), Some("a;b='c\"d é"));
        assert_eq!(address.user.as_deref(), Some("o\"x"));
        assert_eq!((address.host.as_str(), address.port), ("db", PORT));
        assert_eq!(address.database.as_deref(), Some("D"));
    }

    #[test]
    fn servers_are_named_in_every_usual_way() {
        for (text, name) in [
            (".", "localhost:1433"),
            ("(local),1500", "localhost:1500"),
            ("tcp:db.local", "db.local:1433"),
            ("TCP:db.local, 1444", "db.local:1444"),
            ("db\\SQLEXPRESS,49172", "db:49172"),
            ("[::1],1433", "[::1]:1433"),
        ] {
            let address = Address::parse(&format!("Data Source={text}")).expect("well formed");
            assert_eq!(address.name(), name, "{text}");
        }
    }

    #[test]
    fn what_can_not_work_is_refused_with_its_remedy_and_without_its_values() {
        for (text, says) in [
            ("", "name the server"),
            ("postgres://a:hunter2@b/c", "not a connection string"),
            ("Server=db\\SQLEXPRESS;Password=hunter2", "own port"),
            ("Server=np:\\\\db\\pipe;Password=hunter2", "listens for TCP"),
            ("Server=db;Integrated Security=SSPI", "SQL login"),
            ("Server=db;Authentication=Active Directory Default", "keys auth and credential"),
            ("Server=db;ApplicationIntent=ReadOnly", "takes no writes"),
            ("Server=db;Encrypt=strict", "not supported"),
            ("Server=db;Encrypt=hunter2", "true or false"),
            ("Server=db;Encrypt=DANGER_PLAINTEXT", "this machine alone"),
            ("Server=db;Password=a;hunter2", "has no ="),
            ("Server=db;Password=a;hunter2=b", "unknown"),
            ("Server=db;Password='hunter2", "does not end"),
            ("Server=db;Password='a'hunter2", "follows"),
            ("Server=db;Connect Timeout=hunter2", "whole seconds"),
            ("Server=db,0", "host,port"),
            ("Server=db;Packet Size=100", "512 to 32767"),
            ("Server=db;TrustServerCertificate=yes;ServerCertificate=a.pem", "leave one"),
        ] {
            let error = refused(text);
            assert!(error.contains(says), "{text}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
        let near = Address::parse("Server=127.0.0.1,1433;Encrypt=DANGER_PLAINTEXT");
        assert_eq!(near.expect("on this machine").encryption, Encryption::Nothing);
    }

    proptest::proptest! {
        #[test]
        fn reading_never_panics(text in ".{0,80}") {
            let _ = Address::parse(&text);
        }

        #[test]
        fn a_quoted_password_reads_back(password in ".{1,40}") {
            let text = format!("Server=db;Password='{}';User ID=a", password.replace('\'', "''"));
            let address = Address::parse(&text).expect("well formed");
            proptest::prop_assert_eq!(
                address.password.as_ref().map(Secret::expose),
                Some(password.as_str())
            );
        }
    }
}
