module turnstile.bench

go 1.19
