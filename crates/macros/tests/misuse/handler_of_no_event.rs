use postrider::{DocumentStore, UnitOfWork};

fn register<S: DocumentStore>(work: &mut UnitOfWork<S>) {
    work.on::<String>(|_, _| Box::pin(async { Ok(()) }));
}

fn main() {}
