use std::sync::Arc;

use postrider::{UnitOfWork, sqlite::SqliteStore};

async fn share(work: Arc<UnitOfWork<SqliteStore>>) {
    drop(work.commit().await);
}

fn main() {}
