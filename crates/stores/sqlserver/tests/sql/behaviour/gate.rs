//! A gate in a procedure: sessions that ask for it wait there, so that a test decides who goes
//! first. By application locks, which every server has; no test sleeps and hopes.

use std::time::{Duration, Instant};

use super::world::Session;

/// How long a session may take to come to the gate.
const PATIENCE: Duration = Duration::from_secs(60);

/// Statements that let a session wait at the gate, if it called [`wait_at_gate`].
pub(crate) const GATE: &str = "
    if convert(int, session_context(N'gate')) = 1
    begin
        exec sp_getapplock @Resource = N'[changefeed]/reached', @LockMode = 'Exclusive',
            @LockOwner = 'Session';
        exec sp_getapplock @Resource = N'[changefeed]/gate', @LockMode = 'Exclusive',
            @LockOwner = 'Session';
        exec sp_releaseapplock @Resource = N'[changefeed]/gate', @LockOwner = 'Session';
        exec sp_releaseapplock @Resource = N'[changefeed]/reached', @LockOwner = 'Session';
    end;
";

/// Lets this session wait there from now on.
pub(crate) async fn wait_at_gate(session: &mut Session) {
    session.run("declare @one int = 1; exec sp_set_session_context N'gate', @one;").await;
}

/// Closes the gate; this session holds it.
pub(crate) async fn close(session: &mut Session) {
    session
        .run(
            "exec sp_getapplock @Resource = N'[changefeed]/gate', @LockMode = 'Exclusive',
                 @LockOwner = 'Session';",
        )
        .await;
}

/// Opens it again.
pub(crate) async fn open(session: &mut Session) {
    session
        .run("exec sp_releaseapplock @Resource = N'[changefeed]/gate', @LockOwner = 'Session';")
        .await;
}

/// Returns once a session waits at the gate.
pub(crate) async fn reached(session: &mut Session) {
    let ends = Instant::now() + PATIENCE;
    let ask = "declare @granted int;
        exec @granted = sp_getapplock @Resource = N'[changefeed]/reached',
            @LockMode = 'Exclusive', @LockOwner = 'Session', @LockTimeout = 50;
        if @granted >= 0
            exec sp_releaseapplock @Resource = N'[changefeed]/reached', @LockOwner = 'Session';
        select @granted as granted;";
    loop {
        let granted = session.run(ask).await.iter().flatten().last().and_then(|row| row.get(0));
        if granted.is_some_and(|granted: i32| granted < 0) {
            return;
        }
        assert!(Instant::now() < ends, "nobody came to the gate");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
