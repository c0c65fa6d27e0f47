//! Messages of TDS 7.4 as a server reads and writes them.
//!
//! What lives here: packets, requests taken apart, answers put together. What does not: when which
//! answer is given (`mod.rs`).
//! Invariant: what is written is what SQL Server writes, type by type, so that clients of other
//! makers read it, too; the layouts are those of MS-TDS.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use uuid::Uuid;

/// Kinds of packets.
pub(crate) const BATCH: u8 = 0x01;
pub(crate) const RPC: u8 = 0x03;
pub(crate) const RESPONSE: u8 = 0x04;
pub(crate) const ATTENTION: u8 = 0x06;
pub(crate) const TRANSACTION: u8 = 0x0e;
pub(crate) const LOGIN: u8 = 0x10;
pub(crate) const PRELOGIN: u8 = 0x12;

const HEADER: usize = 8;
const LAST: u8 = 0x01;
/// What this server answers in, whatever the client asked for.
const PACKET: usize = 4_096;
/// SQL_Latin1_General_CP1_CI_AS.
const COLLATION: [u8; 5] = [0x09, 0x04, 0xd0, 0x00, 0x34];

/// One whole message: its kind and its bytes without the packets' heads.
pub(crate) async fn read_message<S: AsyncRead + Unpin>(
    stream: &mut S,
) -> std::io::Result<(u8, Vec<u8>)> {
    let mut message = Vec::new();
    loop {
        let mut head = [0; HEADER];
        stream.read_exact(&mut head).await?;
        let length = usize::from(u16::from_be_bytes([head[2], head[3]]));
        let begun = message.len();
        message.resize(begun + length - HEADER, 0);
        stream.read_exact(&mut message[begun..]).await?;
        if head[1] & LAST != 0 {
            return Ok((head[0], message));
        }
    }
}

/// Writes a message in packets; one that is `cut` ends in the middle of a packet.
pub(crate) async fn write_message<S: AsyncWrite + Unpin>(
    stream: &mut S,
    message: &[u8],
    cut: bool,
) -> std::io::Result<()> {
    let mut chunks = message.chunks(PACKET - HEADER).enumerate().peekable();
    while let Some((number, chunk)) = chunks.next() {
        let last = chunks.peek().is_none();
        let promised = if cut && last { chunk.len() + 64 } else { chunk.len() } + HEADER;
        let mut packet = vec![RESPONSE, u8::from(last && !cut)];
        packet.extend(u16::try_from(promised).expect("a packet is small").to_be_bytes());
        packet.extend([0, 0, u8::try_from(number % 256).expect("below 256"), 0]);
        packet.extend(chunk);
        stream.write_all(&packet).await?;
    }
    stream.flush().await
}

/// A value, as a parameter of a request or in a row of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Null,
    Int(i64),
    Text(String),
    Bytes(Vec<u8>),
    Uuid(Uuid),
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<&[u8]> for Value {
    fn from(bytes: &[u8]) -> Self {
        Self::Bytes(bytes.to_vec())
    }
}

/// Types of columns, as the store's statements return them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    Int,
    BigInt,
    NVarChar(u16),
    NVarCharMax,
    Binary(u16),
    VarBinaryMax,
    UniqueIdentifier,
}

/// Reads along a message.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        Some(self.take(1)?[0])
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    /// The parts of a long value, and whether it is none.
    fn parts(&mut self) -> Option<Option<Vec<u8>>> {
        if self.u64()? == u64::MAX {
            return Some(None);
        }
        let mut whole = Vec::new();
        loop {
            match usize::try_from(self.u32()?).ok()? {
                0 => return Some(Some(whole)),
                length => whole.extend(self.take(length)?),
            }
        }
    }

    /// A value's bytes whose length is told in 16 bits, or in parts where the type has no limit.
    fn bytes(&mut self, most: u16) -> Option<Option<Vec<u8>>> {
        if most == u16::MAX {
            return self.parts();
        }
        match self.u16()? {
            u16::MAX => Some(None),
            length => Some(Some(self.take(length.into())?.to_vec())),
        }
    }

    /// A type and a value of it. Nothing for a type that no client here sends.
    fn value(&mut self) -> Option<Value> {
        match self.u8()? {
            // A null of no type: no text of this client's may be one, for not all engines take it.
            0x1f => None,
            // int of 1, 2, 4 or 8 bytes, and bit
            0x26 | 0x68 => {
                self.u8()?;
                let length = usize::from(self.u8()?);
                let bytes = self.take(length)?;
                let mut wide = [0; 8];
                wide[..length].copy_from_slice(bytes);
                let sign = length > 1 && bytes.last().is_some_and(|byte| byte & 0x80 != 0);
                if sign {
                    wide[length..].fill(0xff);
                }
                Some(match length {
                    0 => Value::Null,
                    _ => Value::Int(i64::from_le_bytes(wide)),
                })
            }
            // uniqueidentifier
            0x24 => {
                self.u8()?;
                match self.u8()? {
                    0 => Some(Value::Null),
                    length => {
                        let bytes = self.take(length.into())?.try_into().ok()?;
                        Some(Value::Uuid(Uuid::from_bytes_le(bytes)))
                    }
                }
            }
            // nvarchar, nchar
            0xe7 | 0xef => {
                let most = self.u16()?;
                self.take(COLLATION.len())?;
                let bytes = self.bytes(most)?;
                Some(bytes.map_or(Value::Null, |bytes| Value::Text(text(&bytes))))
            }
            // varbinary, binary
            0xa5 | 0xad => {
                let most = self.u16()?;
                Some(self.bytes(most)?.map_or(Value::Null, Value::Bytes))
            }
            _ => None,
        }
    }
}

fn text(utf16: &[u8]) -> String {
    let units: Vec<u16> =
        utf16.chunks_exact(2).map(|two| u16::from_le_bytes([two[0], two[1]])).collect();
    String::from_utf16_lossy(&units)
}

fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

/// The text of a batch, without the headers that say which transaction it is in.
pub(crate) fn batch_text(message: &[u8]) -> String {
    let headers = Cursor(message).u32().and_then(|length| usize::try_from(length).ok());
    text(headers.and_then(|length| message.get(length..)).unwrap_or_default())
}

/// The name of a called procedure (or of the one with a number), and its parameters.
pub(crate) fn call(message: &[u8]) -> Option<(String, Vec<Value>)> {
    let headers = usize::try_from(Cursor(message).u32()?).ok()?;
    let mut rest = Cursor(message.get(headers..)?);
    let name = match rest.u16()? {
        u16::MAX => match rest.u16()? {
            10 => "sp_executesql".to_owned(),
            number => format!("procedure {number}"),
        },
        chars => text(rest.take(2 * usize::from(chars))?),
    };
    rest.u16()?;
    let mut values = Vec::new();
    while !rest.0.is_empty() {
        let chars = rest.u8()?;
        rest.take(2 * usize::from(chars))?;
        rest.u8()?;
        values.push(rest.value()?);
    }
    Some((name, values))
}

/// Which transaction request: 5 begins, 7 commits, 8 rolls back.
pub(crate) fn transaction_request(message: &[u8]) -> Option<u16> {
    let headers = usize::try_from(Cursor(message).u32()?).ok()?;
    Cursor(message.get(headers..)?).u16()
}

/// What a client says of itself when it logs in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password: String,
    pub(crate) application: String,
    pub(crate) database: String,
    pub(crate) token: Option<String>,
}

impl Login {
    pub(crate) fn parse(message: &[u8]) -> Option<Self> {
        let field = |at: usize| -> Option<&[u8]> {
            let mut place = Cursor(message.get(at..)?);
            let (offset, chars) = (usize::from(place.u16()?), usize::from(place.u16()?));
            message.get(offset..offset + 2 * chars)
        };
        let hidden: Vec<u8> = field(44)?.iter().map(|byte| (byte ^ 0xa5).rotate_left(4)).collect();
        let mut login = Self {
            user: text(field(40)?),
            password: text(&hidden),
            application: text(field(48)?),
            database: text(field(68)?),
            token: None,
        };
        // ExtensionUsed: the place of the extensions' place.
        if message.get(27)? & 0x10 != 0 {
            let at = usize::from(Cursor(message.get(56..)?).u16()?);
            let at = usize::try_from(Cursor(message.get(at..)?).u32()?).ok()?;
            login.token = token(message.get(at..)?);
        }
        Some(login)
    }
}

/// The access token among a login's extensions.
fn token(extensions: &[u8]) -> Option<String> {
    let mut rest = Cursor(extensions);
    loop {
        let kind = rest.u8()?;
        if kind == 0xff {
            return None;
        }
        let length = usize::try_from(rest.u32()?).ok()?;
        let mut body = Cursor(rest.take(length)?);
        if kind == 0x02 {
            body.u8()?;
            let length = usize::try_from(body.u32()?).ok()?;
            return Some(text(body.take(length)?));
        }
    }
}

/// The encryption that a client's first message asks for.
pub(crate) fn asked_encryption(message: &[u8]) -> Option<u8> {
    let mut rest = Cursor(message);
    loop {
        let option = rest.u8()?;
        if option == 0xff {
            return None;
        }
        let offset = usize::from(u16::from_be_bytes(rest.take(2)?.try_into().ok()?));
        rest.take(2)?;
        if option == 1 {
            return message.get(offset).copied();
        }
    }
}

/// The first answer: a version of SQL Server, how much is encrypted, no MARS.
pub(crate) fn prelogin(encryption: u8, wants_token: bool) -> Vec<u8> {
    let mut options: Vec<(u8, Vec<u8>)> = vec![
        (0, vec![16, 0, 0x10, 0x00, 0, 0]),
        (1, vec![encryption]),
        (2, vec![0]),
        (3, Vec::new()),
        (4, vec![0]),
    ];
    if wants_token {
        options.push((6, vec![1]));
    }
    let mut offset = options.len() * 5 + 1;
    let mut message = Vec::new();
    for (option, data) in &options {
        message.push(*option);
        message.extend(u16::try_from(offset).expect("small").to_be_bytes());
        message.extend(u16::try_from(data.len()).expect("small").to_be_bytes());
        offset += data.len();
    }
    message.push(0xff);
    message.extend(options.into_iter().flat_map(|(_, data)| data));
    message
}

/// An answer in the making.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tokens(pub(crate) Vec<u8>);

fn short_text(out: &mut Vec<u8>, text: &str) {
    out.push(u8::try_from(text.encode_utf16().count()).expect("a short text"));
    out.extend(utf16(text));
}

impl Tokens {
    /// A token whose length stands before its body in 16 bits.
    fn sized(&mut self, kind: u8, body: &[u8]) {
        self.0.push(kind);
        self.0.extend(u16::try_from(body.len()).expect("a short token").to_le_bytes());
        self.0.extend(body);
    }

    /// A changed setting, by its texts.
    pub(crate) fn changed(&mut self, what: u8, new: &str, old: &str) {
        let mut body = vec![what];
        short_text(&mut body, new);
        short_text(&mut body, old);
        self.sized(0xe3, &body);
    }

    /// A changed setting, by its bytes.
    fn changed_bytes(&mut self, what: u8, new: &[u8], old: &[u8]) {
        let mut body = vec![what];
        for bytes in [new, old] {
            body.push(u8::try_from(bytes.len()).expect("short"));
            body.extend(bytes);
        }
        self.sized(0xe3, &body);
    }

    /// The client is let in.
    pub(crate) fn login_done(&mut self, database: &str, with_token: bool) {
        self.changed(1, database, "master");
        self.changed_bytes(7, &COLLATION, &[]);
        self.changed(2, "us_english", "");
        let mut body = vec![1, 0x74, 0, 0, 4];
        short_text(&mut body, "Microsoft SQL Server");
        body.extend([16, 0, 0x10, 0]);
        self.sized(0xad, &body);
        self.changed(4, "4096", "4096");
        if with_token {
            self.0.extend([0xae, 2, 0, 0, 0, 0, 0xff]);
        }
        self.done(0xfd, 0, None);
    }

    /// The client is sent to another server.
    pub(crate) fn routed(&mut self, host: &str, port: u16) {
        let mut value = vec![0];
        value.extend(port.to_le_bytes());
        value.extend(u16::try_from(host.encode_utf16().count()).expect("short").to_le_bytes());
        value.extend(utf16(host));
        let mut body = vec![20];
        body.extend(u16::try_from(value.len()).expect("short").to_le_bytes());
        body.extend(value);
        body.extend([0, 0]);
        self.sized(0xe3, &body);
    }

    /// A transaction began (8), was committed (9) or rolled back (10).
    pub(crate) fn transaction(&mut self, what: u8) {
        let number = 7u64.to_le_bytes();
        match what {
            8 => self.changed_bytes(8, &number, &[]),
            _ => self.changed_bytes(what, &[], &number),
        }
    }

    pub(crate) fn columns(&mut self, columns: &[(&str, Type)]) {
        self.0.push(0x81);
        self.0.extend(u16::try_from(columns.len()).expect("few").to_le_bytes());
        for (name, of) in columns {
            // No user type; nullable.
            self.0.extend([0, 0, 0, 0, 1, 0]);
            self.type_info(*of);
            short_text(&mut self.0, name);
        }
    }

    fn type_info(&mut self, of: Type) {
        match of {
            Type::Int => self.0.extend([0x26, 4]),
            Type::BigInt => self.0.extend([0x26, 8]),
            Type::UniqueIdentifier => self.0.extend([0x24, 16]),
            Type::NVarChar(chars) => {
                self.0.push(0xe7);
                self.0.extend((2 * chars).to_le_bytes());
                self.0.extend(COLLATION);
            }
            Type::NVarCharMax => {
                self.0.extend([0xe7, 0xff, 0xff]);
                self.0.extend(COLLATION);
            }
            Type::Binary(bytes) => {
                self.0.push(0xad);
                self.0.extend(bytes.to_le_bytes());
            }
            Type::VarBinaryMax => self.0.extend([0xa5, 0xff, 0xff]),
        }
    }

    pub(crate) fn row(&mut self, columns: &[(&str, Type)], values: &[Value]) {
        assert_eq!(columns.len(), values.len(), "a row has a value for each column");
        self.0.push(0xd1);
        columns.iter().zip(values).for_each(|((name, of), value)| self.value(name, *of, value));
    }

    fn value(&mut self, name: &str, of: Type, value: &Value) {
        let (bytes, short) = match (of, value) {
            (Type::Int | Type::BigInt | Type::UniqueIdentifier, Value::Null) => {
                return self.0.push(0);
            }
            (_, Value::Null) => (None, matches!(of, Type::NVarCharMax | Type::VarBinaryMax)),
            (Type::Int, Value::Int(number)) => {
                let number = i32::try_from(*number).expect("an int");
                self.0.push(4);
                return self.0.extend(number.to_le_bytes());
            }
            (Type::BigInt, Value::Int(number)) => {
                self.0.push(8);
                return self.0.extend(number.to_le_bytes());
            }
            (Type::UniqueIdentifier, Value::Uuid(id)) => {
                self.0.push(16);
                return self.0.extend(id.to_bytes_le());
            }
            (Type::NVarChar(_), Value::Text(text)) => (Some(utf16(text)), false),
            // As it stands, for what is no text.
            (Type::NVarChar(_), Value::Bytes(bytes)) => (Some(bytes.clone()), false),
            (Type::NVarCharMax, Value::Text(text)) => (Some(utf16(text)), true),
            (Type::Binary(length), Value::Bytes(bytes)) => {
                assert_eq!(bytes.len(), usize::from(length), "binary has one length");
                (Some(bytes.clone()), false)
            }
            (Type::VarBinaryMax, Value::Bytes(bytes)) => (Some(bytes.clone()), true),
            (of, value) => panic!("column {name} is {of:?}, its value {value:?}"),
        };
        match (bytes, short) {
            (None, false) => self.0.extend([0xff, 0xff]),
            (None, true) => self.0.extend(u64::MAX.to_le_bytes()),
            (Some(bytes), false) => {
                self.0.extend(u16::try_from(bytes.len()).expect("a short value").to_le_bytes());
                self.0.extend(bytes);
            }
            (Some(bytes), true) => {
                self.0.extend((bytes.len() as u64).to_le_bytes());
                for part in bytes.chunks(8_000) {
                    self.0.extend(u32::try_from(part.len()).expect("short").to_le_bytes());
                    self.0.extend(part);
                }
                self.0.extend([0; 4]);
            }
        }
    }

    /// 0xfd of a batch, 0xff within a procedure, 0xfe after one.
    pub(crate) fn done(&mut self, kind: u8, status: u16, rows: Option<u64>) {
        self.0.push(kind);
        let status = status | if rows.is_some() { 0x10 } else { 0 };
        self.0.extend(status.to_le_bytes());
        self.0.extend(0xc1u16.to_le_bytes());
        self.0.extend(rows.unwrap_or(0).to_le_bytes());
    }

    pub(crate) fn return_status(&mut self, status: i32) {
        self.0.push(0x79);
        self.0.extend(status.to_le_bytes());
    }

    pub(crate) fn error(&mut self, number: u32, class: u8, message: &str) {
        let mut body = number.to_le_bytes().to_vec();
        body.extend([1, class]);
        body.extend(u16::try_from(message.encode_utf16().count()).expect("short").to_le_bytes());
        body.extend(utf16(message));
        short_text(&mut body, "mock");
        short_text(&mut body, "");
        body.extend(1u32.to_le_bytes());
        self.sized(0xaa, &body);
    }
}
