use postrider::{UnitOfWork, sqlite::SqliteStore};
use tokio::task::JoinSet;

fn share(mut work: UnitOfWork<SqliteStore>, tasks: &mut JoinSet<()>) {
    tasks.spawn(async move { drop(work.commit().await) });
    tasks.spawn(async move { drop(work.commit().await) });
}

fn main() {}
