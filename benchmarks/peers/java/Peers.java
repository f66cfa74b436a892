import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentLinkedQueue;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryForever;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/** Locks of Java in the benchmarks: does what lines on its standard input say, and answers with figures and "ok". */
class Peers {
    interface Mutex {
        void acquire() throws Exception;

        void release() throws Exception;
    }

    /** A client of one library; closing it closes its connections. */
    interface Library {
        Mutex mutex(String name);

        void close();
    }

    interface Work {
        void run() throws Exception;
    }

    private static Library library;
    /** By name; both are owned by the thread that reads the orders. */
    private static final Map<String, Mutex> taken = new HashMap<>();

    private static Mutex first;
    private static final List<Thread> waiters = new ArrayList<>();
    private static final ConcurrentLinkedQueue<Double> entered = new ConcurrentLinkedQueue<>();

    public static void main(String[] args) {
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        PrintStream out = new PrintStream(System.out, false);
        int status = 0;
        try {
            for (String line = orders.readLine(); line != null; line = orders.readLine()) {
                obey(line.split(" "), out);
                out.println("ok");
                out.flush();
            }
        } catch (Exception error) {
            out.println(error);
            status = 1;
        }
        out.flush();
        System.exit(status);
    }

    private static void obey(String[] words, PrintStream out) throws Exception {
        switch (words[0]) {
            case "open" -> library = words[1].equals("redisson") ? redisson(words[2]) : curator(words[2]);
            case "close" -> {
                taken.clear();
                library.close();
            }
            case "turns" -> turns(words[1], Integer.parseInt(words[2]));
            case "drain" -> drain(words, out);
            case "take" -> take(words[1], out);
            case "leave" -> leave(words[1], out);
            case "line" -> line(words[1], Integer.parseInt(words[2]));
            case "pass" -> pass(out);
            default -> throw new IllegalArgumentException(String.join(" ", words));
        }
    }

    private static Library curator(String hosts) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(hosts, 30000, 15000, new RetryForever(50));
        client.start();
        client.blockUntilConnected();
        return new Library() {
            public Mutex mutex(String name) {
                InterProcessMutex mutex = new InterProcessMutex(client, "/curator/" + name);
                return new Mutex() {
                    public void acquire() throws Exception {
                        mutex.acquire();
                    }

                    public void release() throws Exception {
                        mutex.release();
                    }
                };
            }

            public void close() {
                client.close();
            }
        };
    }

    private static Library redisson(String address) {
        Config config = new Config();
        config.useSingleServer().setAddress("redis://" + address);
        RedissonClient client = Redisson.create(config);
        return new Library() {
            public Mutex mutex(String name) {
                RLock lock = client.getLock("redisson:" + name);
                return new Mutex() {
                    public void acquire() {
                        lock.lock();
                    }

                    public void release() {
                        lock.unlock();
                    }
                };
            }

            public void close() {
                client.shutdown();
            }
        };
    }

    /** Seconds of the clock that Python calls monotonic. */
    private static double now() {
        return System.nanoTime() / 1e9;
    }

    private static void turns(String name, int count) throws Exception {
        Mutex mutex = library.mutex(name);
        for (int turn = 0; turn < count; turn++) {
            mutex.acquire();
            mutex.release();
        }
    }

    private static void take(String name, PrintStream out) throws Exception {
        Mutex mutex = taken.computeIfAbsent(name, library::mutex);
        mutex.acquire();
        out.println(now());
    }

    private static void leave(String name, PrintStream out) throws Exception {
        double left = now();
        taken.get(name).release();
        out.println(left);
    }

    private static void drain(String[] words, PrintStream out) throws Exception {
        int turns = Integer.parseInt(words[1]);
        long hold = Long.parseLong(words[2]);
        ConcurrentLinkedQueue<String> spans = new ConcurrentLinkedQueue<>();
        List<Thread> contenders = new ArrayList<>();
        for (int number = 0; number < words.length - 3; number++) {
            String name = words[number + 3];
            int mine = number;
            contenders.add(started(() -> contend(name, turns, hold, mine, spans)));
        }
        for (Thread contender : contenders) {
            contender.join();
        }
        spans.forEach(out::println);
    }

    private static void contend(
            String name, int turns, long hold, int number, ConcurrentLinkedQueue<String> spans)
            throws Exception {
        Mutex mutex = library.mutex(name);
        for (int turn = 0; turn < turns; turn++) {
            double asked = now();
            mutex.acquire();
            double inside = now();
            if (hold > 0) {
                Thread.sleep(hold);
            }
            double left = now();
            mutex.release();
            spans.add(asked + " " + inside + " " + left + " " + number);
        }
    }

    private static void line(String name, int count) throws Exception {
        entered.clear();
        waiters.clear();
        first = library.mutex(name);
        first.acquire();
        for (int number = 0; number < count; number++) {
            waiters.add(started(() -> {
                Mutex mutex = library.mutex(name);
                mutex.acquire();
                entered.add(now());
                mutex.release();
            }));
            // Not all at once: each newcomer reads the whole list, and a small server drowns in its answers.
            if (number % 20 == 19) {
                Thread.sleep(30);
            }
        }
    }

    private static void pass(PrintStream out) throws Exception {
        double start = now();
        first.release();
        for (Thread waiter : waiters) {
            waiter.join();
        }
        out.println(start);
        entered.forEach(out::println);
    }

    private static Thread started(Work work) {
        Thread thread = new Thread(null, () -> {
            try {
                work.run();
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
        }, "contender", 256 * 1024);
        thread.start();
        return thread;
    }
}
