//! The stand-in before clients of other makers: what they read of it is what a server would say.
//!
//! Invariant: a client that is not installed is counted as not run, by an ignored test of its own;
//! `cargo nextest run --run-ignored all` asks for all of them.

use std::process::Command;

use uuid::Uuid;

use crate::support::{bytes, int, text};
use crate::tds::wire::{Type, Value};
use crate::tds::{Answer, Mock, Request, Set};

const ID: Uuid = Uuid::from_u128(0x0198_0000_0000_7000_8000_0000_0000_0042);

/// One row of every type that the store's statements return.
fn every_type() -> Set {
    Set::of(&[
        ("i", Type::Int),
        ("b", Type::BigInt),
        ("n", Type::NVarChar(255)),
        ("m", Type::NVarCharMax),
        ("k", Type::Binary(16)),
        ("v", Type::VarBinaryMax),
        ("u", Type::UniqueIdentifier),
        ("z", Type::NVarCharMax),
    ])
    .row([
        int(-7),
        int(1 << 40),
        text("Zoë"),
        text(&"日".repeat(5_000)),
        bytes(&[0xab; 16]),
        bytes(&[7; 9_000]),
        Value::Uuid(ID),
        Value::Null,
    ])
}

fn respond(request: &Request) -> Answer {
    let sql = request.sql();
    match () {
        () if sql.contains("every type") => Answer::set(every_type()),
        () if sql.contains("a deadlock") => Answer::Error(vec![], 1205, 13, "chosen as the victim"),
        () if sql.contains("a cut") => Answer::Cut(vec![every_type()]),
        () => Answer::nothing(),
    }
}

fn run(mut command: Command) -> String {
    let output = command.output().expect("the client is installed");
    let said = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&said).into_owned()
}

async fn in_the_background(command: Command) -> String {
    tokio::task::spawn_blocking(move || run(command)).await.expect("it ends")
}

const PYTDS: &str = "
import sys, uuid, pytds
port = int(sys.argv[1])
with pytds.connect('127.0.0.1', 'shop', 'relay', 's3;cret', port=port, autocommit=True) as c:
    with c.cursor() as cursor:
        cursor.execute('select every type')
        i, b, n, m, k, v, u, z = cursor.fetchall()[0]
        assert (i, b, n, z) == (-7, 1 << 40, 'Zo\\u00eb', None), (i, b, n, z)
        assert m == '\\u65e5' * 5000 and k == bytes([0xab]) * 16 and v == bytes([7]) * 9000
        assert u == uuid.UUID(int=0x01980000000070008000000000000042), u
        cursor.execute('select every type where a = %s and b = %s', ('x', 5))
        assert len(cursor.fetchall()) == 1
        try:
            cursor.execute('a deadlock')
            raise SystemExit('no error')
        except pytds.Error as error:
            assert error.number == 1205, error
with pytds.connect('127.0.0.1', 'shop', 'relay', 's3;cret', port=port, autocommit=True) as c:
    with c.cursor() as cursor:
        try:
            cursor.execute('a cut')
            cursor.fetchall()
            raise SystemExit('no error')
        except Exception as error:
            print('cut:', type(error).__name__)
print('ALL READ')
";

/// python-tds: `pip install python-tds`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python with the package python-tds: another client's view of the stand-in"]
async fn python_tds_reads_every_type_and_fault() {
    let mock = Mock::start(respond).await;
    let python = std::env::var("POSTRIDER_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut command = Command::new(python);
    command.args(["-c", PYTDS, &mock.address().port().to_string()]);
    let said = in_the_background(command).await;
    assert!(said.contains("ALL READ"), "{said}");
    let login = mock.logins().remove(0);
    assert_eq!((login.user.as_str(), login.password.as_str()), ("relay", "s3;cret"));
    let with_values = mock.seen().into_iter().find(|one| one.sql().contains("a = "));
    assert_eq!(with_values.expect("a call").values(), [text("x"), int(5)]);
}

/// FreeTDS's `tsql`: Debian's package freetds-bin.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs FreeTDS's tsql: another client's view of the stand-in"]
async fn freetds_reads_every_type_and_fault() {
    let mock = Mock::start(respond).await;
    let mut command = Command::new("sh");
    let port = mock.address().port();
    let script = format!(
        "printf 'select every type\\ngo\\na deadlock\\ngo\\nselect every type\\ngo\\nexit\\n' \
         | TDSVER=7.4 timeout 20 tsql -H 127.0.0.1 -p {port} -U relay -P 's3;cret' -D shop -o q"
    );
    command.args(["-c", &script]);
    let said = in_the_background(command).await;
    for (seen, times) in [
        ("01980000-0000-7000-8000-000000000042", 2),
        ("1099511627776", 2),
        ("Zoë", 2),
        ("Msg 1205", 1),
        ("chosen as the victim", 1),
    ] {
        assert_eq!(said.matches(seen).count(), times, "{seen}");
    }
}

const MSSQL_PYTHON: &str = "
import sys, uuid, mssql_python
port = sys.argv[1]
c = mssql_python.connect('Server=127.0.0.1,' + port + ';Database=shop;UID=relay;PWD=x;'
    'Encrypt=no;TrustServerCertificate=yes', autocommit=True)
cursor = c.cursor()
cursor.execute('select every type')
i, b, n, m, k, v, u, z = cursor.fetchall()[0]
assert (i, b, n, z) == (-7, 1 << 40, 'Zo\\u00eb', None), (i, b, n, z)
assert m == '\\u65e5' * 5000 and bytes(k) == bytes([0xab]) * 16 and bytes(v) == bytes([7]) * 9000
print('ALL READ')
";

/// Microsoft's ODBC driver 18, as the package mssql-python brings it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python with the package mssql-python: another client's view of the stand-in"]
async fn microsofts_odbc_reads_every_type() {
    let mock = Mock::start(respond).await;
    let python = std::env::var("POSTRIDER_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut command = Command::new(python);
    command.args(["-c", MSSQL_PYTHON, &mock.address().port().to_string()]);
    let said = in_the_background(command).await;
    assert!(said.contains("ALL READ"), "{said}\n{:?}", mock.seen());
}
