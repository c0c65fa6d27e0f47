use postrider::{UnitOfWork, sqlite::SqliteStore};

fn save(work: &mut UnitOfWork<SqliteStore>) {
    work.create(String::from("contact"));
}

fn main() {}
